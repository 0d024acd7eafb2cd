/* The engine of a page with a model in its data: what the model computes from a typed text, in the
 * browser. The page of a server has another engine with the same functions. The model in the data:
 *
 *   {config: {vocab_size, context_length, emb_dim, num_heads, num_layers}, tokenizer: see tokenizer.js,
 *    tensors: [[name, shape]], checkpoints: [{step, weights: packed, means: packed}]}
 *   weights: of each tensor, a vector being one row: the scale of each row (float32), then the values
 *   (int16); a value times the scale of its row is the parameter
 *   means: float32 (layers, emb_dim), the mean context vectors of all heads, concatenated
 *   Numbers are little endian. */

import { inflate } from "./data.js";
import { Gpt } from "./gpt.js";
import { readTokenizer } from "./tokenizer.js";

/** Returns the engine of a model: see typing.js. */
export function embeddedEngine(model) {
  const { config, checkpoints } = model;
  const models = new Map(); // of the checkpoints that were used, by step: at most about 100 MB
  const limit = config.context_length;
  let tokenizer;

  /** Returns [tokenizer, Gpt of this step]. Texts with all heads have another one than texts with fewer:
   * each of them keeps what it has computed. */
  const load = async (step, off) => {
    const checkpoint = checkpoints.find((one) => one.step === step);
    if (!models.has(step)) models.set(step, unpackedModels(model, checkpoint));
    tokenizer ??= readTokenizer(model.tokenizer);
    try {
      const [tokens, pair] = await Promise.all([tokenizer, models.get(step)]);
      return [tokens, pair[off.length ? 1 : 0]];
    } catch {
      throw new Error("The weights in this page are damaged.");
    }
  };

  return {
    steps: checkpoints.map(({ step }) => step),
    limit,

    async read({ text, ids, step, off = [], signal }) {
      const [tokens, gpt] = await load(step, off);
      const all = ids ?? tokens.encode(text, limit);
      if (!all.length) throw new Error("The text has no tokens.");
      const used = all.slice(0, limit);
      const found = await gpt.read(used, off, signal);
      const { next, likely } = found;
      const labels = new Map([...next.ids, ...likely.ids.flat()].map((id) => [id, tokens.label(id)]));
      const labelsOf = (list) => list.map((id) => labels.get(id));
      return {
        ...found,
        ids: used,
        prefix: 0,
        special: model.tokenizer.special,
        ...tokens.describe(used),
        truncated: all.length > used.length,
        next: { ...next, labels: labelsOf(next.ids) },
        likely: { ...likely, labels: likely.ids.map(labelsOf) },
        step,
      };
    },

    async parts({ ids, step, off = [], layer, head, query, key, signal }) {
      const [, gpt] = await load(step, off);
      return gpt.parts(ids, off, layer, head, query, key, signal);
    },
  };
}

/** Returns two Gpt with the same weights. */
async function unpackedModels({ config, tensors }, { weights, means }) {
  const [bytes, meanBytes] = await Promise.all([inflate(weights), inflate(means)]);
  const named = new Map();
  let at = 0;
  for (const [name, shape] of tensors) {
    const width = shape.at(-1);
    const rows = shape.slice(0, -1).reduce((a, b) => a * b, 1);
    // Copies, because the values of a typed array must be aligned.
    const scales = new Float32Array(bytes.slice(at, at + 4 * rows).buffer);
    at += 4 * rows;
    const values = new Int16Array(bytes.slice(at, at + 2 * rows * width).buffer);
    at += 2 * rows * width;
    named.set(name, Float32Array.from(values, (value, n) => value * scales[Math.floor(n / width)]));
  }
  return [0, 1].map(() => new Gpt(config, named, new Float32Array(meanBytes.buffer)));
}
