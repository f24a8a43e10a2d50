// One task of paged attention: the tiles of its keys, with an online softmax. (Milakov and
// Gimelshein, "Online normalizer calculation for softmax"; FlashAttention, section 3.1.)
//
// A tile is all rows of the task by kTileKeys keys, aligned to kTileKeys. A tile that no row sees
// is not loaded. One that every row sees is processed without masks. For the others, the words of
// RowMask::bits select the scores that count, and parts that no one sees are not computed.
// Layer: attention.

struct Tile {
  int64_t first_key;
  bool is_full;
  uint64_t seen;         // by any row
  const uint64_t* bits;  // per query, unless the tile is full
};

class Attend {
 public:
  Attend(const PagedAttentionParams& params, const Task& task, Workspace& workspace)
      : p_(params),
        task_(task),
        num_rows_(task.num_queries * params.group()),
        key_words_(padded_dim(params.k.dim) / kPerWord),
        padded_dim_(padded_dim(params.v.dim)),
        value_words_(padded_dim_ / kPerWord),
        range_(params.mask, task.first_query, task.num_queries, task.request) {
    const int64_t state = Softmax::floats(num_rows_, padded_dim_);
    const int64_t staged = kTileKeys * (key_words_ > value_words_ ? key_words_ : value_words_);
    const int64_t floats = num_rows_ * (key_words_ + 2 * kTileKeys + 1) + 2 * state + staged +
                           kTileKeys * (key_words_ + value_words_) + 2 * task.num_queries +
                           8 * kAlign;
    next_ = workspace.reserve(floats);
    queries_ = take(num_rows_ * key_words_);
    scores_ = take(num_rows_ * kTileKeys);
    weights_ = kPairs ? take(num_rows_ * kTileKeys / kPerWord) : scores_;
    factors_ = take(num_rows_);
    staged_ = take(staged);
    keys_ = take(kTileKeys * key_words_);
    values_ = take(kTileKeys * value_words_);
    bits_ = reinterpret_cast<uint64_t*>(take(2 * task.num_queries));
    split_ = Softmax::in(take(state), num_rows_);
    whole_ = Softmax::in(take(state), num_rows_);
  }

  void run(const Softmax* state) {
    stage_queries();
    const int64_t kv_len = p_.mask.kv_lens[task_.request];
    if (task_.split != kAllSplits) return attend_split(task_.split * kSplitKeys, kv_len, *state);
    clear(whole_, num_rows_, padded_dim_);
    for (int64_t key = 0; key < kv_len; key += kSplitKeys) {
      if (range_.next(key) >= key + kSplitKeys) continue;
      attend_split(key, kv_len, split_);
      fold(split_, whole_, num_rows_, padded_dim_);
    }
    finish(p_, task_, whole_, padded_dim_);
  }

 private:
  static constexpr int64_t kAlign = 16;

  float* take(int64_t count) {
    float* const taken = next_;
    next_ += (count + kAlign - 1) / kAlign * kAlign;
    return taken;
  }

  void stage_queries() {
    const int64_t group = p_.group();
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t query = task_.first_query + row / group;
      const int64_t head = task_.kv_head * group + row % group;
      const char* const from = p_.q + query * p_.q_row_stride + head * p_.q_head_stride;
      stage(p_.q_type, from, p_.k.dim, queries_ + row * key_words_, key_words_);
    }
  }

  // Computes the state after the keys of one split.
  void attend_split(int64_t first_key, int64_t kv_len, const Softmax& state) {
    clear(state, num_rows_, padded_dim_);
    const int64_t end = first_key + kSplitKeys < kv_len ? first_key + kSplitKeys : kv_len;
    for (int64_t key = range_.next(first_key); key < end; key = range_.next(key + kTileKeys)) {
      const Tile tile = tile_at(key);
      if (tile.seen) attend_tile(tile, state);
    }
  }

  Tile tile_at(int64_t key) {
    if (range_.is_full(key)) return {key, true, ~uint64_t{0}, nullptr};
    uint64_t seen = 0, seen_by_all = ~uint64_t{0};
    for (int64_t i = 0; i < task_.num_queries; ++i) {
      bits_[i] = p_.mask.bits(task_.first_query + i, task_.request, key);
      seen |= bits_[i];
      seen_by_all &= bits_[i];
    }
    return {key, seen_by_all == ~uint64_t{0}, seen, bits_};
  }

  void attend_tile(const Tile& tile, const Softmax& state) {
    pack_tile(tile);
    for (int64_t row = 0; row < num_rows_; row += kProductRows) {
      const int64_t count = num_rows_ - row < kProductRows ? num_rows_ - row : kProductRows;
      attend_rows(tile, state, row, count);
    }
  }

  void pack_tile(const Tile& tile) {
    Rows keys, values, next_keys;
    find_rows(p_, p_.k, task_, tile.first_key, tile.seen, keys);
    find_rows(p_, p_.v, task_, tile.first_key, tile.seen, values);
    const int64_t next = tile.first_key + kTileKeys;
    find_rows(p_, p_.k, task_, next, range_.is_full(next) ? ~uint64_t{0} : 0, next_keys);
    stage_rows(p_.k, staged_, key_words_, keys);
    pack_keys(keys, key_words_, values, p_.v.dim * size_of(p_.v.type), keys_);
    stage_rows(p_.v, staged_, value_words_, values);
    pack_values(values, value_words_, next_keys, p_.k.dim * size_of(p_.k.type), values_);
  }

  uint64_t row_bits(const Tile& tile, int64_t row) const {
    return tile.is_full ? ~uint64_t{0} : tile.bits[row / p_.group()];
  }

  void attend_rows(const Tile& tile, const Softmax& state, int64_t row, int64_t count) {
    uint64_t seen = 0;
    for (int64_t i = row; i < row + count; ++i) seen |= row_bits(tile, i);
    if (!seen) return;
    Words words{queries_ + row * key_words_, key_words_, keys_, {0, key_words_}};
    for (int64_t key = 0; key < kTileKeys; key += kPanel, words.panel += key_words_ * kPanel) {
      if (!(seen >> key & RowMask::below(kPanel))) continue;
      product_of(count, words, scores_ + row * kTileKeys + key, kTileKeys, nullptr);
    }
    // All maxima first, so that the processor does not stall on each of them.
    for (int64_t i = row; i < row + count; ++i) mask(i, row_bits(tile, i), state);
    for (int64_t i = row; i < row + count; ++i) weigh(i, state);
    constexpr int64_t kWeightWords = kTileKeys / kPerWord;
    const int64_t first = __builtin_ctzll(seen), last = 63 - __builtin_clzll(seen);
    words = {weights_ + row * kWeightWords,
             kWeightWords,
             values_,
             {first / kPerWord, last / kPerWord + 1}};
    float* to = state.values + row * padded_dim_;
    for (int64_t dim = 0; dim < padded_dim_; dim += kPanel, to += kPanel) {
      product_of(count, words, to, padded_dim_, factors_ + row);
      words.panel += kWeightWords * kPanel;
    }
  }

  // Scales and masks the scores of a row; the maximum so far goes to factors_.
  void mask(int64_t row, uint64_t bits, const Softmax& state) {
    float* const scores = scores_ + row * kTileKeys;
    const float scale = p_.scale * kLog2E * (p_.k.scales ? p_.k.scales[task_.kv_head] : 1.f);
    Vector best = splat(state.maximum[row]);
    for (int64_t key = 0; key < kTileKeys; key += kLanes) {
      Vector score = load(scores + key) * splat(scale);
      if (~bits) score = select(bits >> key, score, -INFINITY);
      store(scores + key, score);
      best = maximum(score, best);
    }
    factors_[row] = largest(best);
  }

  // Turns these scores into weights, 2^(score - maximum), and adds them to the state.
  void weigh(int64_t row, const Softmax& state) {
    float* const scores = scores_ + row * kTileKeys;
    const float old = state.maximum[row], now = factors_[row];
    const float from = now == -INFINITY ? 0.f : now;
    Vector sum{};
    for (int64_t key = 0; key < kTileKeys; key += 2 * kLanes) {
      const Vector low = exp2(load(scores + key) - splat(from));
      const Vector high = exp2(load(scores + key + kLanes) - splat(from));
      sum += low + high;
      store_weights(row, key, low, high);
    }
    factors_[row] = old == now ? 1.f : exp2(old - from);
    state.maximum[row] = now;
    state.sum[row] = state.sum[row] * factors_[row] + total(sum);
  }

  void store_weights(int64_t row, int64_t key, Vector low, Vector high) {
    float* const to = weights_ + (row * kTileKeys + key) / kPerWord;
#if MK_PAIRS
    store(to, (Vector)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    store(to, low);
    store(to + kLanes, high);
#endif
  }

  const PagedAttentionParams& p_;
  const Task& task_;
  const int64_t num_rows_, key_words_, padded_dim_, value_words_;
  const TileRange range_;
  float *next_, *queries_, *scores_, *weights_, *factors_, *staged_, *keys_, *values_;
  uint64_t* bits_;
  Softmax split_, whole_;
};

static void attend(const PagedAttentionParams& params, const Task& task, const Softmax* state,
                   Workspace& workspace) {
  Attend(params, task, workspace).run(state);
}
