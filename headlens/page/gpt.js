/* Runs a GPT of clearhead (model.py and attention.py) in the browser: attention and predictions on a
 * text, and the parts of an attention score.
 *
 *     const gpt = new Gpt(config, tensors, means);
 *     const { codes, losses, next } = await gpt.read(ids, off, signal);
 *
 * Tensors are float32, as in PyTorch; sums are float64. What has been computed for a text stays: a text
 * that begins with the same tokens costs only its new ones.
 *
 * Shapes: T tokens, C emb_dim, H heads of each layer, D head_dim, V vocabulary, L layers. Matrices are
 * stored row by row. */

const AT_ONCE = 4; // positions: `linear` reads each weight once for all four
const PIECE = 15; // milliseconds of computing, then the page can react
const NEXT_COUNT = 40; // most likely tokens after the last position
const LIKELY_COUNT = 5; // at each position
const PAIR_COUNT = 20;

/** Returns the dot product of n numbers of a matrix, from index `row` on, and of x, from `at` on. */
function dotRow(matrix, row, x, at, n) {
  let one = 0, two = 0, three = 0, four = 0, i = 0;
  for (; i + 4 <= n; i += 4) {
    one += matrix[row + i] * x[at + i];
    two += matrix[row + i + 1] * x[at + i + 1];
    three += matrix[row + i + 2] * x[at + i + 2];
    four += matrix[row + i + 3] * x[at + i + 3];
  }
  for (; i < n; i++) one += matrix[row + i] * x[at + i];
  return one + two + three + four;
}

/** Computes a linear layer for `count` positions: the first rows of x and of out. */
function linear({ weight, bias }, x, count, out) {
  const outs = bias.length;
  const ins = weight.length / outs;
  if (count < AT_ONCE) {
    for (let n = 0; n < count; n++) {
      for (let j = 0; j < outs; j++) {
        out[n * outs + j] = bias[j] + dotRow(weight, j * ins, x, n * ins, ins);
      }
    }
    return;
  }
  // Two rows of the matrix and four positions together: six numbers are read for eight products.
  for (let j = 0; j < outs; j += 2) {
    const next = Math.min(j + 1, outs - 1);
    let a0 = bias[j], a1 = a0, a2 = a0, a3 = a0;
    let b0 = bias[next], b1 = b0, b2 = b0, b3 = b0;
    for (let i = 0, row = j * ins, row2 = next * ins; i < ins; i++, row++, row2++) {
      const a = weight[row], b = weight[row2];
      const x0 = x[i], x1 = x[ins + i], x2 = x[2 * ins + i], x3 = x[3 * ins + i];
      a0 += a * x0;
      a1 += a * x1;
      a2 += a * x2;
      a3 += a * x3;
      b0 += b * x0;
      b1 += b * x1;
      b2 += b * x2;
      b3 += b * x3;
    }
    out[j] = a0;
    out[outs + j] = a1;
    out[2 * outs + j] = a2;
    out[3 * outs + j] = a3;
    out[next] = b0;
    out[outs + next] = b1;
    out[2 * outs + next] = b2;
    out[3 * outs + next] = b3;
  }
}

/** Computes LayerNorm of the numbers of x from `at` on, into out. Returns 1 / standard deviation. */
function layerNorm({ weight, bias }, x, at, out) {
  const n = weight.length;
  let mean = 0, variance = 0;
  for (let i = 0; i < n; i++) mean += x[at + i] / n;
  for (let i = 0; i < n; i++) variance += (x[at + i] - mean) ** 2 / n;
  const scale = 1 / Math.sqrt(variance + 1e-5);
  for (let i = 0; i < n; i++) out[at + i] = (x[at + i] - mean) * scale * weight[i] + bias[i];
  return scale;
}

/** Computes GELU with the tanh approximation, in place: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)). */
function gelu(x, n) {
  const factor = -Math.sqrt(8 / Math.PI);
  for (let i = 0; i < n; i++) {
    const value = x[i];
    x[i] = value / (1 + Math.exp(factor * (value + 0.044715 * value * value * value)));
  }
}

/** Returns what the logits, V numbers from `at` on, predict: the most likely tokens, and the logarithm
 * of the sum of the exponentials of all logits, for the loss. */
function predict(logits, at, V) {
  const ids = [];
  for (let id = 0; id < V; id++) {
    const logit = logits[at + id];
    if (ids.length === NEXT_COUNT && !(logit > logits[at + ids.at(-1)])) continue;
    if (ids.length === NEXT_COUNT) ids.pop();
    let place = ids.length;
    while (place > 0 && logit > logits[at + ids[place - 1]]) place--;
    ids.splice(place, 0, id);
  }
  const most = logits[at + ids[0]];
  let sum = 0;
  for (let id = 0; id < V; id++) sum += Math.exp(logits[at + id] - most);
  const logSum = most + Math.log(sum);
  return { ids, probabilities: ids.map((id) => Math.exp(logits[at + id] - logSum)), logSum };
}

export class Gpt {
  #config;
  #tokens; // the token embedding, which is the output layer too
  #positions;
  #finalNorm;
  #layers;
  #buffers; // of the positions that are computed at once
  #ids = []; // the text of the cache
  #off = new Set(); // heads that are switched off in the cache
  #done = 0; // positions in the cache
  #outputs; // (T, C): inputs of the output layer
  #codes = []; // of each position (L H, position + 1)
  #predictions = []; // of each position, see predict
  #turn = Promise.resolve(); // until the cache is free

  /** config: as ModelConfig of model.py. tensors: a Map of the state dict, name -> Float32Array; a bias
   * may be absent. means: Float32Array (L, C), the mean context vectors of the heads. */
  constructor(config, tensors, means) {
    const { vocab_size: V, context_length: limit, emb_dim: C, num_heads: H } = config;
    const module = (name) => ({ weight: tensors.get(`${name}.weight`),
      bias: tensors.get(`${name}.bias`) ?? new Float32Array(C) });
    this.#config = { V, C, H, D: C / H };
    this.#tokens = { weight: tensors.get("token_emb.weight"), bias: new Float32Array(V) };
    this.#positions = tensors.get("pos_emb.weight");
    this.#finalNorm = module("final_norm");
    this.#outputs = new Float64Array(limit * C);
    this.#layers = Array.from({ length: config.num_layers }, (_, layer) => {
      const part = (name) => module(`blocks.${layer}.${name}`);
      return {
        attnNorm: part("attn_norm"), query: part("attn.W_query"), key: part("attn.W_key"),
        value: part("attn.W_value"), output: part("attn.out_proj"), mlpNorm: part("mlp_norm"),
        fc: part("mlp.fc"), mlpOutput: part("mlp.out_proj"),
        means: means.subarray(layer * C, (layer + 1) * C),
        keys: new Float32Array(limit * C), values: new Float32Array(limit * C),
        contexts: new Float32Array(limit * C), mlps: new Float32Array(limit * C), // what the MLP adds
        scales: new Float64Array(limit), // 1 / standard deviation of the input
        norms: new Float64Array(limit * H), // of value vectors, see value_norms of attention.py
      };
    });
    const rows = (n) => new Float64Array(AT_ONCE * n);
    this.#buffers = { x: rows(C), normed: rows(C), queries: rows(C), values: rows(C),
      contexts: rows(C), added: rows(C), hidden: rows(4 * C), logits: rows(V),
      scores: new Float64Array(limit) };
  }

  /** Returns {codes, norms, largest_norms, losses, likely: {ids, probabilities}, next: {ids,
   * probabilities}} of a text of at least one token and at most the context length. off: the indices
   * (layer * H + head) of heads that are switched off: their context vectors are their means. */
  read(ids, off, signal) {
    return this.#inTurn(async () => {
      await this.#compute(ids, off, signal);
      return this.#reading();
    });
  }

  /** Returns the parts of the score of a query and a key in a head: {score, mean, sources, pairs}. The
   * input of a layer is a sum; with the standard deviation of each token as it is, LayerNorm and the
   * projections are linear, so each query and each key is a sum over the same sources. The value of a
   * pair is the product of the query's part and of the key's part less its mean over the row. */
  parts(ids, off, layer, head, query, key, signal) {
    return this.#inTurn(async () => {
      await this.#compute(ids, off, signal);
      return this.#score(layer, head, query, key);
    });
  }

  /** Calls a function when all calls before it have ended: they use the same cache. */
  #inTurn(work) {
    const result = this.#turn.then(work);
    this.#turn = result.catch(() => {});
    return result;
  }

  /** Computes the positions of a text that are not in the cache. */
  async #compute(ids, off, signal) {
    signal?.throwIfAborted();
    let known = off.length === this.#off.size && off.every((index) => this.#off.has(index))
      ? Math.min(this.#done, ids.length) : 0;
    const differs = this.#ids.findIndex((id, n) => id !== ids[n]);
    if (differs >= 0) known = Math.min(known, differs);
    [this.#ids, this.#off, this.#done] = [[...ids], new Set(off), known];
    let began = performance.now();
    while (this.#done < ids.length) {
      const count = Math.min(AT_ONCE, ids.length - this.#done);
      this.#forward(this.#done, count);
      this.#done += count;
      if (performance.now() - began < PIECE) continue;
      await new Promise((done) => { setTimeout(done); });
      signal?.throwIfAborted();
      began = performance.now();
    }
  }

  /** Computes `count` positions from `start` on; those before it are in the cache. */
  #forward(start, count) {
    const { V, C, H } = this.#config;
    const { x, normed, queries, values, contexts, added, hidden, logits } = this.#buffers;
    const keep = (cache, rows) => cache.set(rows.subarray(0, count * C), start * C);
    const add = () => { for (let i = 0; i < count * C; i++) x[i] += added[i]; };
    for (let i = 0; i < count * C; i++) {
      const id = this.#ids[start + Math.floor(i / C)];
      x[i] = this.#tokens.weight[id * C + (i % C)] + this.#positions[start * C + i];
    }
    for (let n = 0; n < count; n++) {
      this.#codes[start + n] = new Uint8Array(this.#layers.length * H * (start + n + 1));
    }
    this.#layers.forEach((layer, index) => {
      for (let n = 0; n < count; n++) {
        layer.scales[start + n] = layerNorm(layer.attnNorm, x, n * C, normed);
      }
      linear(layer.key, normed, count, added);
      keep(layer.keys, added);
      linear(layer.value, normed, count, values);
      keep(layer.values, values);
      linear(layer.query, normed, count, queries);
      for (let n = 0; n < count; n++) {
        for (let head = 0; head < H; head++) this.#attend(index, head, start + n, n);
      }
      keep(layer.contexts, contexts);
      linear(layer.output, contexts, count, added);
      add();
      for (let n = 0; n < count; n++) layerNorm(layer.mlpNorm, x, n * C, normed);
      linear(layer.fc, normed, count, hidden);
      gelu(hidden, count * 4 * C);
      linear(layer.mlpOutput, hidden, count, added);
      keep(layer.mlps, added);
      add();
    });
    for (let n = 0; n < count; n++) layerNorm(this.#finalNorm, x, n * C, normed);
    keep(this.#outputs, normed);
    linear(this.#tokens, normed, count, logits);
    for (let n = 0; n < count; n++) this.#predictions[start + n] = predict(logits, n * V, V);
  }

  /** Computes the attention of a head at a position, the n-th of those that are computed at once. */
  #attend(index, head, position, n) {
    const { C, H, D } = this.#config;
    const { queries, values, contexts, scores } = this.#buffers;
    const { keys, values: known, means, norms, output } = this.#layers[index];
    const codes = this.#codes[position];
    const root = Math.sqrt(D);
    const column = head * D;
    const at = n * C + column;
    const number = index * H + head;
    let most = -Infinity, sum = 0, squares = 0;
    for (let key = 0; key <= position; key++) {
      scores[key] = dotRow(keys, key * C + column, queries, at, D) / root;
      most = Math.max(most, scores[key]);
    }
    for (let key = 0; key <= position; key++) {
      scores[key] = Math.exp(scores[key] - most);
      sum += scores[key];
    }
    contexts.fill(0, at, at + D);
    for (let key = 0; key <= position; key++) {
      const weight = scores[key] / sum;
      codes[number * (position + 1) + key] = Math.round(255 * Math.sqrt(weight));
      const from = key * C + column;
      for (let i = 0; i < D; i++) contexts[at + i] += weight * known[from + i];
    }
    if (this.#off.has(number)) contexts.set(means.subarray(column, column + D), at);
    for (let row = column; row < C * C; row += C) {
      squares += dotRow(output.weight, row, values, at, D) ** 2;
    }
    norms[position * H + head] = Math.sqrt(squares);
  }

  #reading() {
    const { C, H } = this.#config;
    const [T, heads] = [this.#done, this.#layers.length * H];
    const codes = new Uint8Array((heads * T * (T + 1)) / 2);
    const norms = new Uint8Array(heads * T);
    const largest = [];
    for (let head = 0, at = 0; head < heads; head++) {
      for (let query = 0; query < T; at += ++query) {
        const from = head * (query + 1);
        codes.set(this.#codes[query].subarray(from, from + query + 1), at);
      }
      const of = this.#layers[Math.floor(head / H)].norms;
      const norm = (position) => of[position * H + (head % H)];
      let most = 0;
      for (let n = 0; n < T; n++) most = Math.max(most, norm(n));
      largest.push(most);
      for (let n = 0; n < T; n++) norms[head * T + n] = Math.round(255 * Math.sqrt(norm(n) / most));
    }
    const found = this.#predictions.slice(0, T);
    const losses = this.#ids.slice(1).map((id, n) =>
      found[n].logSum - dotRow(this.#tokens.weight, id * C, this.#outputs, n * C, C));
    const most = (key) => found.map((one) => one[key].slice(0, LIKELY_COUNT));
    const { ids, probabilities } = found[T - 1];
    return { codes, norms, largest_norms: largest, losses, next: { ids, probabilities },
      likely: { ids: most("ids"), probabilities: most("probabilities") } };
  }

  #score(layer, head, query, key) {
    const { H, D } = this.#config;
    const { query: toQuery, key: toKey } = this.#layers[layer];
    const row = Array.from({ length: query + 1 }, (_, n) => n);
    const queries = this.#project(layer, head, toQuery, [query]);
    const keys = this.#project(layer, head, toKey, [key]);
    const means = this.#project(layer, head, toKey, row);
    const product = (one, other) => dotRow(one, 0, other, 0, D) / Math.sqrt(D);
    const sum = (parts) => parts[0].map((_, i) => parts.reduce((all, part) => all + part[i], 0));
    const sources = [{ kind: "token" }, { kind: "position" }];
    for (let of = 0; of < layer; of++) {
      for (let from = 0; from < H; from++) sources.push({ kind: "head", layer: of, head: from });
      sources.push({ kind: "mlp", layer: of });
    }
    sources.push({ kind: "biases" });
    const centred = keys.map((part, n) => part.map((value, i) => value - means[n][i]));
    const pairs = queries.flatMap((part, n) =>
      centred.map((other, m) => [n, m, product(part, other)]));
    pairs.sort(([,, one], [,, other]) => Math.abs(other) - Math.abs(one));
    return { score: product(sum(queries), sum(keys)), mean: product(sum(queries), sum(means)),
      sources, pairs: pairs.slice(0, PAIR_COUNT) };
  }

  /** Returns the part of each source in a query or key of a head, (D) each: means over positions. */
  #project(index, head, { weight, bias }, positions) {
    const { C, H, D } = this.#config;
    const { attnNorm, scales } = this.#layers[index];
    const amount = (position) => scales[position] / positions.length;
    const mean = (matrix, row = (position) => position) => {
      const total = new Float64Array(C);
      for (const position of positions) {
        const from = row(position) * C;
        for (let i = 0; i < C; i++) total[i] += amount(position) * matrix[from + i];
      }
      return total;
    };
    const parts = [mean(this.#tokens.weight, (n) => this.#ids[n]), mean(this.#positions)];
    const biases = new Float64Array(C);
    const scale = positions.reduce((sum, position) => sum + amount(position), 0);
    for (const { output, contexts, mlps } of this.#layers.slice(0, index)) {
      const context = mean(contexts);
      for (let column = 0; column < C; column += D) {
        parts.push(biases.map((_, i) => dotRow(output.weight, i * C + column, context, column, D)));
      }
      parts.push(mean(mlps));
      for (let i = 0; i < C; i++) biases[i] += scale * output.bias[i];
    }
    parts.push(biases);
    return parts.map((part) => {
      const isLast = part === biases;
      const centre = part.reduce((sum, value) => sum + value, 0) / C;
      const normed = part.map((value, i) =>
        (value - centre) * attnNorm.weight[i] + (isLast ? attnNorm.bias[i] : 0));
      return new Float64Array(D).map((_, i) =>
        dotRow(weight, (head * D + i) * C, normed, 0, C) + (isLast ? bias[head * D + i] : 0));
    });
  }
}
