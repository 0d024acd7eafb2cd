/* The model behind a page of a server, which computes in Python (clearhead/output/live_typing.py). It has
 * the same functions as that of embedded.js, which computes in the page. */

const MOST_LETTERS = 10_000;

/** Returns the engine of a page: `steps` and `limit` come later, from state.json. token: the server
 * computes only for pages that know it. */
export function servedEngine(token) {
  const ask = async (address, { signal, ...content }) => {
    const headers = { "Content-Type": "application/json", "X-Clearhead-Token": token };
    const body = JSON.stringify(content);
    const answer = await fetch(address, { method: "POST", body, signal, headers }).catch((error) => {
      throw signal.aborted ? error : new Error("The server does not answer.");
    });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    return answer;
  };
  return {
    steps: [],
    limit: 0,
    async read({ text, ...wanted }) {
      const cut = text?.slice(0, MOST_LETTERS); // the server refuses long requests
      const buffer = await (await ask("read", { text: cut, ...wanted })).arrayBuffer();
      const length = new DataView(buffer).getUint32(0, true);
      const { has_norms: hasNorms, ...reading } =
        JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
      const bytes = new Uint8Array(buffer, 4 + length);
      const count = reading.ids.length;
      const heads = bytes.length / ((count * (count + 1)) / 2 + (hasNorms ? count : 0));
      const end = heads * ((count * (count + 1)) / 2);
      return { ...reading, codes: bytes.subarray(0, end), norms: hasNorms ? bytes.subarray(end) : null };
    },
    parts: async (wanted) => (await ask("parts", wanted)).json(),
  };
}
