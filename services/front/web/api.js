// The server: the same endpoints and the same tokens as programs use.

const TOKEN = "slipstream-token";

/** What the server said no to. */
export class Refused extends Error {
  constructor(status, error) {
    super(error.message || `status ${status}`);
    this.status = status;
    this.code = error.code;
  }
}

/** The server, or what is behind it, is not there now; asking again may help. */
export class Away extends Error {}

// The token lives as long as the tab, and no other tab sees it.
export const token = () => sessionStorage.getItem(TOKEN) || "";
export function keepToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

/** The response. Throws `Refused`, `Away`, or an AbortError. */
export async function send(path, options = {}) {
  const headers = { ...(options.headers || {}), ...(token() ? { authorization: `Bearer ${token()}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Away("the server does not answer");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  if (response.status === 503 || response.status === 504) throw new Away(said.error?.message || "the server is not ready");
  throw new Refused(response.status, said.error || {});
}

export const get = async (path, options) => (await send(path, options)).json();
export const post = (path, value, options = {}) =>
  get(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value), ...options });

/** What a stream of server-sent events says, one parsed object after the other, to its `[DONE]`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Away("the stream broke off");
      });
      if (done) throw new Away("the stream broke off");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue; // a ping
        const text = block.slice(6);
        if (text === "[DONE]") return;
        const said = JSON.parse(text);
        if (said.error) throw said.error.code === "unavailable" ? new Away(said.error.message) : new Refused(0, said.error);
        yield said;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Leaves nothing at the signal, which may be that of a page that is open for days. */
export const pause = (seconds, signal) =>
  new Promise((resolve, reject) => {
    const leave = () => {
      clearTimeout(timer);
      reject(new DOMException("left", "AbortError"));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", leave);
      resolve();
    }, 1000 * seconds);
    signal?.addEventListener("abort", leave, { once: true });
  });

/** Returns when the server can do its work again. */
export async function untilReady(signal) {
  for (let wait_s = 0.5; ; wait_s = Math.min(2 * wait_s, 5)) {
    try {
      await send("/ready", { signal });
      return;
    } catch (error) {
      if (!(error instanceof Away)) throw error;
    }
    await pause(wait_s, signal);
  }
}
