/* Decodes the data of a page. index.html describes the format. */

const VERSION = 6; // of the data, see headlens/page/__init__.py
const DECODED_BYTES = 200e6; // limit for the decoded frames in memory

/** Returns the data of the JSON text of a page: {runs, training, live}. Throws an Error with a user
 * message for a damaged page, and for data of another version. */
export function readData(text) {
  const data = JSON.parse(text);
  if (data.version !== VERSION) throw new Error("Another version of the lens wrote this data.");
  data.runs ??= [];
  return data;
}

/** Returns the bytes of packed data. */
export async function inflate(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const inflateJson = async (text) => JSON.parse(new TextDecoder().decode(await inflate(text)));

/** Decodes the history of a run and computes the offset of each prompt in a frame. */
export async function prepare(run) {
  run.count = run.layers * run.heads;
  run.size = run.normSize = 0;
  for (const prompt of run.prompts) {
    prompt.length = prompt.tokens.length;
    prompt.triangle = (prompt.length * (prompt.length + 1)) / 2;
    prompt.start = run.size;
    prompt.normStart = run.normSize;
    run.size += run.count * prompt.triangle;
    run.normSize += run.count * prompt.length;
  }
  try {
    const { steps, values, errors } = await inflateJson(run.history);
    Object.assign(run, { steps, errors, significance: values.significance });
    (await inflateJson(run.heads_at)).forEach((heads, n) => { run.frames[n].heads = heads; });
    run.story = run.story ? await inflateJson(run.story) : null;
    const text = run.text ? await inflateJson(run.text) : null;
    run.textSigns = text?.signs;
    run.windows = text && text.texts.map((texts, n) =>
      ({ texts, labels: text.labels[n], length: texts.length }));
    for (const statistic of run.statistics) {
      statistic.values = Object.hasOwn(values, statistic.key) ? values[statistic.key] : [];
      statistic.empty = !statistic.values.flat().some(Number.isFinite);
    }
  } catch {
    throw new Error(`The statistics of ${run.name} are invalid. Write the page again.`);
  }
  return run;
}

const load = async (address) => (await fetch(address)).json();
const decoded = []; // frames with bytes, in the order in which they were decoded

/** Returns the bytes of a frame. Decodes the frame at the first call. */
export function decode(run, index) {
  const frame = run.frames[index];
  const parts = async () => {
    const { weights, details, norms } = frame.address ? await load(frame.address) : frame;
    return Promise.all([inflate(weights), inflateJson(details), norms ? inflate(norms) : null]);
  };
  frame.pending ??= frame.read ? frame.read().catch((error) => {
    frame.pending = undefined; // it can be computed later
    throw error;
  }) : parts().then(
    ([bytes, details, norms]) => {
      if (bytes.length !== run.size || (norms && norms.length !== run.normSize)) throw 0;
      Object.assign(frame, { bytes, facts: details, normBytes: norms });
      decoded.push(frame);
      let kept = decoded.reduce((sum, f) => sum + f.bytes.length, 0);
      while (kept > DECODED_BYTES && decoded.length > 2) {
        const old = decoded.shift();
        kept -= old.bytes.length;
        old.bytes = old.pending = undefined;
      }
      return bytes;
    },
  ).catch(() => {
    if (frame.address) frame.pending = undefined; // it can be loaded later
    throw new Error(`The weights of step ${frame.step} of ${run.name} are invalid.`);
  });
  return frame.pending;
}

/** Decodes the other frames while the browser is idle, up to DECODED_BYTES. */
export async function prefetch(run) {
  const many = Math.min(run.frames.length, Math.floor(DECODED_BYTES / run.size) - 2);
  for (let index = 0; index < many; index++) {
    await new Promise((done) => (window.requestIdleCallback ?? setTimeout)(done));
    await decode(run, index).catch(() => {});
  }
}

/** Returns one weight of a head; NaN if it does not exist or its frame is not decoded. */
export function weight(run, frame, prompt, index, query, key) {
  const { start, triangle } = run.prompts[prompt];
  const place = start + index * triangle + (query * (query + 1)) / 2 + key;
  return key > query ? 0 : ((run.frames[frame].bytes?.[place] ?? NaN) / 255) ** 2;
}
