// Asks again and again while the page is seen, and goes on by itself when a server that was away is back.

import { Away, pause } from "./api.js";

/** `ask(signal)` and then `show(answer)`, every `seconds`; `complain(message)` where the answer is no. Returns what ends it. */
export function poll(seconds, ask, show, complain) {
  const leaving = new AbortController();
  (async () => {
    for (;;) {
      try {
        if (!document.hidden) {
          show(await ask(leaving.signal));
          complain("");
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        complain(error instanceof Away ? `${error.message}; it is asked again` : error.message);
      }
      await pause(seconds, leaving.signal);
    }
  })().catch((error) => {
    if (error.name !== "AbortError") throw error;
  });
  return () => leaving.abort();
}
