// Views of the page without a browser: `node page_views.mjs JOURNEY FOLDER` takes one journey through the scripts in
// FOLDER and prints what was seen as JSON. Elements here are what those scripts use of elements, and nothing is drawn.

import { getEventListeners } from "node:events";

const [journey, folder] = process.argv.slice(2);
const script = (name) => import(`${folder}/${name}`);

class Element extends EventTarget {
  constructor(name) {
    super();
    Object.assign(this, { name, children: [], attributes: {}, text: "", value: "", disabled: false, classList: { toggle() {} } });
  }

  setAttribute(name, value) {
    this.attributes[name] = value;
    if (name === "disabled") this.disabled = true;
  }

  append(...children) {
    this.children.push(...children.map((child) => (child instanceof Element ? child : Object.assign(new Element(""), { text: String(child) }))));
  }

  replaceChildren(...children) {
    this.textContent = "";
    this.append(...children);
  }

  get textContent() {
    return this.text + this.children.map((child) => child.textContent).join("");
  }

  set textContent(text) {
    Object.assign(this, { children: [], text: String(text) });
  }

  get valueAsNumber() {
    return Number.NaN;
  }

  focus() {}

  click() {
    if (!this.disabled) this.dispatchEvent(new Event("click"));
  }
}

class Ignored extends EventTarget {
  observe() {}
  disconnect() {}
}

Object.assign(globalThis, { document: { hidden: false, createElement: (name) => new Element(name) }, sessionStorage: { getItem: () => null }, confirm: () => true });
Object.assign(globalThis, { requestAnimationFrame: () => 1, cancelAnimationFrame: () => {}, matchMedia: () => new Ignored(), ResizeObserver: Ignored });
globalThis.FileReader = class {
  readAsDataURL() {
    this.result = "data:;base64,AAAA";
    queueMicrotask(() => this.onload());
  }
};

const every = (element) => [element, ...element.children.flatMap(every)];
const button = (main, text) => every(main).find((one) => one.name === "button" && one.textContent === text);
const json = (value, status = 200) => new Response(JSON.stringify(value), { status });
const later = globalThis.setTimeout;

/** Returns when it is so. */
async function until(isSo) {
  while (!isSo()) await new Promise((resolve) => later(resolve, 1));
}

const journeys = {
  /** Another file is chosen while a caption is written, captioned, and stopped. */
  async another_file() {
    const calls = [];
    globalThis.fetch = async (path, { signal }) => (path === "/v1/models" ? json({ data: [{ id: "m" }] }) : stream(signal));
    const stream = (signal) => {
      calls.push(signal);
      return new Response(new ReadableStream({ start: (body) => signal.addEventListener("abort", () => body.error(signal.reason)) }));
    };
    const main = new Element("main");
    (await script("try.js")).tryIt(main);
    const [start, stop] = ["Caption it", "Stop"].map((text) => button(main, text));
    const picker = every(main).find((one) => one.attributes.id === "file");
    for (const name of ["a.mp4", "b.mp4"]) {
      picker.files = [Object.assign(new Blob(["clip"], { type: "video/mp4" }), { name })];
      picker.dispatchEvent(new Event("change"));
      await until(() => !start.disabled);
      start.click();
      await until(() => calls.length === (name === "a.mp4" ? 1 : 2));
    }
    const isFirstEnded = calls[0].aborted;
    const mayStop = !stop.disabled;
    stop.click();
    await until(() => !start.disabled);
    return { isFirstEnded, mayStop, ended: calls.map((signal) => signal.aborted) };
  },

  /** Two questions about one file, the second of which knows the first; then the file is captioned anew. */
  async further_question() {
    const bodies = [];
    const chunk = (value) => `data: ${JSON.stringify(value)}\n\n`;
    const timings = { prompt_ms: 1, predicted_per_second: 1, predicted_n: 1, draft_n: 0 };
    const answer = chunk({ choices: [], slipstream: { tokens: [["A ", true], ["cat.", false]] } }) + chunk({ choices: [{}], timings, slipstream: {} });
    globalThis.fetch = async (path, { body }) => {
      if (path === "/v1/models") return json({ data: [{ id: "m" }] });
      bodies.push(JSON.parse(await body.text()).messages);
      return new Response(`${answer}data: [DONE]\n\n`);
    };
    const main = new Element("main");
    (await script("try.js")).tryIt(main);
    const [start, further] = ["Caption it", "Ask on"].map((text) => button(main, text));
    const [picker, prompt] = ["id", "maxlength"].map((name) => every(main).find((one) => one.name === "input" && one.attributes[name]));
    const ask = async (by, question) => {
      prompt.value = question;
      by.click();
      await until(() => !start.disabled);
    };
    picker.files = [Object.assign(new Blob(["clip"], { type: "video/mp4" }), { name: "a.mp4" })];
    picker.dispatchEvent(new Event("change"));
    const mayAskOnAtFirst = !further.disabled;
    await ask(start, "");
    await ask(further, "");
    await ask(further, "And then?");
    await ask(start, "What?");
    const texts = bodies.map((messages) => messages.map(({ role, content }) => [role, Array.isArray(content) ? content.map(({ text = "video" }) => text) : content]));
    return { mayAskOnAtFirst, texts };
  },

  /** A picture is captioned: as a video of one frame, and where there is a reader, which reads it as a page. */
  async a_picture() {
    const mayAskOn = [];
    const chunk = (value) => `data: ${JSON.stringify(value)}\n\n`;
    const timings = { prompt_ms: 1, predicted_per_second: 1, predicted_n: 1, draft_n: 0 };
    const answer = chunk({ choices: [], slipstream: { tokens: [["A cat.", false]] } }) + chunk({ choices: [{}], timings, slipstream: {} });
    for (const reads_documents of [false, true]) {
      globalThis.fetch = async (path) => (path === "/v1/models" ? json({ data: [{ id: "m", slipstream: { reads_documents } }] }) : new Response(`${answer}data: [DONE]\n\n`));
      const main = new Element("main");
      (await script("try.js")).tryIt(main);
      const [start, further] = ["Caption it", "Ask on"].map((text) => button(main, text));
      const picker = every(main).find((one) => one.attributes.id === "file");
      picker.files = [Object.assign(new Blob(["picture"], { type: "image/png" }), { name: "a.png" })];
      picker.dispatchEvent(new Event("change"));
      start.click();
      await until(() => !start.disabled);
      mayAskOn.push(!further.disabled);
    }
    return { mayAskOn };
  },

  /** A batch may not be cancelled; what was said of that once the batch was asked for anew. */
  async refused_cancel() {
    const counts = { total: 1, queued: 1, running: 0, done: 0, failed: 0, dead: 0, cancelled: 0 };
    const found = { key: "k", batch_id: "b", state: "queued", is_ended: false, counts, totals: { shared: 0, skipped: 0 } };
    const pauses = [];
    let numLooks = 0;
    globalThis.setTimeout = (go) => pauses.push(go);
    globalThis.fetch = async (path, { method }) => {
      if (method === "POST") return json({ error: { message: "you may not" } }, 403);
      if (path.endsWith("/errors")) return json({ errors: [] });
      if (path.includes("/jobs")) return json({ jobs: [], next_page: null });
      numLooks += 1;
      return json(found);
    };
    const main = new Element("main");
    (await script("batch.js")).batch(main, "b");
    await until(() => pauses.length === 1);
    button(main, "Cancel").click();
    const isTold = () => every(main).some((one) => one.attributes.role === "status" && one.textContent === "you may not");
    await until(isTold);
    pauses[0]();
    await until(() => pauses.length === 2);
    return { numLooks, isTold: isTold() };
  },

  /** Of batches with something that failed, those that may run again and those that may not. */
  async retries() {
    const counts = { total: 1, queued: 0, running: 0, done: 0, failed: 1, dead: 0, cancelled: 0 };
    const found = { key: "k", batch_id: "b", state: "completed", is_ended: true, counts, totals: { shared: 0, skipped: 0 } };
    const mayRetry = [];
    for (const may_retry of [true, false]) {
      const pauses = [];
      globalThis.setTimeout = (go) => pauses.push(go);
      globalThis.fetch = async (path) => {
        if (path.endsWith("/errors")) return json({ errors: [] });
        return json(path.includes("/jobs") ? { jobs: [], next_page: null } : { ...found, may_retry });
      };
      const main = new Element("main");
      (await script("batch.js")).batch(main, "b");
      await until(() => pauses.length === 1);
      mayRetry.push(!button(main, "Retry").disabled);
    }
    return { mayRetry };
  },

  /** What pauses leave at the signal of their page. */
  async pauses() {
    const { pause } = await script("api.js");
    const leaving = new AbortController();
    for (let number = 0; number < 20; number += 1) await pause(0, leaving.signal);
    const left = getEventListeners(leaving.signal, "abort").length;
    const last = pause(3600, leaving.signal).catch((error) => error.name);
    leaving.abort();
    return { left, last: await last };
  },
};

process.stdout.write(`${JSON.stringify(await journeys[journey]())}\n`);
process.exit(0); // whatever still waits
