/* Asks a server for changes, twice a second while the answer is visible. */

const POLL_PAUSE = 500; // milliseconds

/** Calls take(the JSON) with each new answer of an address; take may return false, to get it again.
 * After each request, calls tell(status, text): the HTTP status, 0 without a connection. It pauses while isNeeded() is false. */
export async function poll(address, take, tell, isNeeded = () => true) {
  for (let before = null; ;) {
    if (!isNeeded()) {
      await new Promise((done) => setTimeout(done, POLL_PAUSE / 5));
      continue;
    }
    let answer = { status: 0, text: "" };
    try {
      const response = await fetch(address, { cache: "no-cache" });
      answer = { status: response.status, text: await response.text() };
    } catch {
      // The server has stopped. It may be started again.
    }
    tell(answer.status, answer.text);
    if (answer.status === 200 && answer.text !== before) {
      const isTaken = await take(JSON.parse(answer.text));
      if (isTaken !== false) before = answer.text;
    }
    await new Promise((done) => setTimeout(done, POLL_PAUSE));
    while (document.hidden) {
      await new Promise((done) =>
        document.addEventListener("visibilitychange", done, { once: true }));
    }
  }
}
