// The states of rows: see Softmax in paged_attention.h. Layer: attention.
//
// A row has seen nothing if its sum is 0, as its largest score adds 1 to it. Its maximum does not
// show that: it is also -inf if all scores are NaN, which must stay NaN.

static void clear(const Softmax& state, int64_t num_rows, int64_t padded_dim) {
  for (int64_t row = 0; row < num_rows; ++row) state.maximum[row] = -INFINITY;
  __builtin_memset(state.sum, 0, num_rows * sizeof(float));
  __builtin_memset(state.values, 0, num_rows * padded_dim * sizeof(float));
}

// Merges in the state after other keys.
static void fold(const Softmax& other, const Softmax& state, int64_t num_rows, int64_t padded_dim) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const float old = state.maximum[row], added = other.maximum[row];
    if (other.sum[row] == 0.f) continue;
    const float now = added > old ? added : old;
    const float keep = exp2(old - now), take = exp2(added - now);
    state.maximum[row] = now;
    state.sum[row] = state.sum[row] * keep + other.sum[row] * take;
    float* const values = state.values + row * padded_dim;
    const float* const others = other.values + row * padded_dim;
    for (int64_t i = 0; i < padded_dim; i += kLanes) {
      store(values + i, load(values + i) * splat(keep) + load(others + i) * splat(take));
    }
  }
}

// Computes the results of a task's rows from their states.
static void finish(const PagedAttentionParams& p, const Task& task, const Softmax& state,
                   int64_t padded_dim) {
  const RowFunctions& functions = RowFunctions::best();
  const int64_t group = p.group(), itemsize = size_of(p.q_type);
  const float scale = p.v.scales ? p.v.scales[task.kv_head] : 1.f;
  for (int64_t row = 0; row < task.num_queries * group; ++row) {
    const int64_t head = task.kv_head * group + row % group;
    const int64_t index = (task.first_query + row / group) * p.num_heads + head;
    const float sum = state.sum[row];
    const bool is_empty = sum == 0.f;
    p.lse[index] = is_empty ? -INFINITY : (state.maximum[row] + log2f(sum)) * kLn2;
    float* const values = state.values + row * padded_dim;
    functions.multiply(values, p.v.dim, is_empty ? 0.f : scale / sum);
    functions.store(p.q_type, values, p.v.dim, p.out + index * p.v.dim * itemsize);
  }
}

static void merge(const PagedAttentionParams& p, const Task& task, float* splits,
                  int64_t num_splits, Workspace& workspace) {
  const int64_t num_rows = task.num_queries * p.group(), width = padded_dim(p.v.dim);
  const int64_t floats = Softmax::floats(num_rows, width);
  const Softmax whole = Softmax::in(workspace.reserve(floats), num_rows);
  clear(whole, num_rows, width);
  for (int64_t i = 0; i < num_splits; ++i) {
    fold(Softmax::in(splits + i * floats, num_rows), whole, num_rows, width);
  }
  finish(p, task, whole, width);
}
