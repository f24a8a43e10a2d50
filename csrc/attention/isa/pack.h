// Reads the keys and values of a tile through the block table and packs them for products.h. Keys
// that no query of the tile sees are not loaded; they become 0. Layer: attention.

// The words of a row of `dim` elements, padded with zeros to `num_words`.
static void stage(ElementType type, const char* row, int64_t dim, float* words, int64_t num_words) {
  if (!kPairs) {
    RowFunctions::best().load(type, row, dim, words);
  } else if (type == ElementType::kBFloat16) {
    __builtin_memcpy(words, row, dim * 2);
  } else {  // fp8: exact in bfloat16
    constexpr int64_t kPart = 128;
    float values[kPart];
    auto* const codes = reinterpret_cast<uint16_t*>(words);
    for (int64_t first = 0; first < dim; first += kPart) {
      const int64_t count = dim - first < kPart ? dim - first : kPart;
      RowFunctions::best().load(type, row + first, count, values);
      for (int64_t i = 0; i < count; ++i) {
        codes[first + i] = static_cast<uint16_t>(bits_of(values[i]) >> 16);
      }
    }
  }
  char* const end = reinterpret_cast<char*>(words + num_words);
  char* const behind = reinterpret_cast<char*>(words) + dim * (kPairs ? 2 : 4);
  __builtin_memset(behind, 0, end - behind);
}

using Rows = const char* [kTileKeys];

// Finds the rows of a tile; null where `seen` has no bit.
static void find_rows(const PagedAttentionParams& p, const PagedCache& cache, const Task& task,
                      int64_t first_key, uint64_t seen, Rows& rows) {
  const int32_t* const table = p.block_table + task.request * p.table_stride;
  const char* const head = cache.data + task.kv_head * cache.head_stride;
  int64_t entry = first_key / p.block_size, token = first_key % p.block_size;
  for (int64_t key = 0; key < kTileKeys; ++key) {
    rows[key] = nullptr;
    if (seen >> key & 1) {
      const int64_t block = table[entry];
      if (block >= 0 && block < p.num_blocks) {
        rows[key] = head + block * cache.block_stride + token * cache.token_stride;
      } else {
        report_bad_entry(*p.bad_entry, task.request * p.table_stride + entry);
      }
    }
    if (++token == p.block_size) token = 0, ++entry;
  }
}

// The same rows as words: rows that the cache already stores as such stay there; the others are
// made in `staged`, [kTileKeys][num_words].
static void stage_rows(const PagedCache& cache, float* staged, int64_t num_words, Rows& rows) {
  const bool has_words = cache.type == (kPairs ? ElementType::kBFloat16 : ElementType::kFloat32) &&
                         cache.dim == num_words * kPerWord;
  const char* zeros = nullptr;  // one row for all unseen keys
  for (int64_t key = 0; key < kTileKeys; ++key, staged += num_words) {
    if (rows[key] && has_words) continue;
    if (rows[key]) {
      stage(cache.type, rows[key], cache.dim, staged, num_words);
    } else if (zeros) {
      rows[key] = zeros;
      continue;
    } else {
      zeros = static_cast<char*>(__builtin_memset(staged, 0, num_words * sizeof(float)));
    }
    rows[key] = reinterpret_cast<const char*>(staged);
  }
}

// The rows are scattered, so the processor would not predict them.
static void prefetch_rows(const Rows& rows, int64_t first, int64_t count, int64_t num_bytes) {
  constexpr int64_t kLineBytes = 64;
  for (int64_t key = first; key < first + count; ++key) {
    for (int64_t i = 0; rows[key] && i < num_bytes; i += kLineBytes) {
      __builtin_prefetch(rows[key] + i);
    }
  }
}

// To panels of keys, [panel][word][kPanel]; `later`: the rows needed next, to prefetch.
static void pack_keys(const Rows& rows, int64_t num_words, const Rows& later, int64_t later_bytes,
                      float* panels) {
  for (int64_t key = 0; key < kTileKeys; key += kLanes) {
    prefetch_rows(later, key, kLanes, later_bytes);
    float* const panel = panels + key / kPanel * num_words * kPanel + key % kPanel;
    for (int64_t word = 0; word < num_words; word += kLanes) {
      transpose(rows + key, word, panel + word * kPanel, kPanel);
    }
  }
}

// To panels of dims, [panel][keys / kPerWord][kPanel].
static void pack_values(const Rows& rows, int64_t num_words, const Rows& later, int64_t later_bytes,
                        float* panels) {
  constexpr int64_t kPanelWords = kTileKeys / kPerWord * kPanel;
  for (int64_t key = 0; key < kTileKeys; key += kPerWord) {
    prefetch_rows(later, key, kPerWord, later_bytes);
    float* to = panels + key / kPerWord * kPanel;
    for (int64_t word = 0; word < num_words; word += kPanel / kPerWord, to += kPanelWords) {
      if constexpr (kPairs) {
        interleave(load(rows[key], word), load(rows[key + 1], word), to,
                   std::make_integer_sequence<int, kLanes>());
      } else {
        store(to, load(rows[key], word));
        store(to + kLanes, load(rows[key], word + kLanes));
      }
    }
  }
}
