// "Batch": how one batch stands, what failed and why, and what may be done about it.

import { get, post } from "./api.js";
import { make } from "./dom.js";
import { ended, markedOf, MARKS_ARE, notesOf, whyWaiting } from "./figures.js";
import { poll } from "./poll.js";
import { bar, Cards, link, Table } from "./table.js";

const EVERY_S = 2;

export function batch(main, id) {
  const view = new BatchView(id);
  main.append(view.element);
  return () => view.close();
}

class BatchView {
  #pages = [""];
  #next = null;
  #seen = { version: "" };
  #leaving = new AbortController();

  constructor(id) {
    this.id = id;
    this.path = `/archive/batches/${encodeURIComponent(id)}`;
    this.name = make("h1", {}, "Batch");
    this.told = make("p", { class: "bad", role: "status" });
    this.done = make("p", { class: "good", role: "status" });
    this.refused = make("p", { class: "bad", role: "status" }); // what a button has led to: `told` is the polls'
    this.waits = make("p", { class: "soft", role: "status" });
    this.progress = make("progress", { "aria-label": "Jobs that have ended" });
    this.cards = new Cards();
    this.errors = new Table("Errors", ["What", "Status", "State", "Items", "Such as"], "Nothing failed.");
    this.jobs = new Table("Items", ["Item", "State", "At, or why not", "Tokens", "Marks", "Failed runs"], "There is no item here.");
    this.retry = make("button", { type: "button", click: () => this.#do("retry", "Run again what was given up or failed?", "?failed=true") }, "Retry");
    this.cancel = make("button", { type: "button", click: () => this.#do("cancel", "Cancel what waits and what runs?") }, "Cancel");
    this.export = make("button", { type: "button", click: () => this.#export() }, "Export as JSON lines");
    this.before = make("button", { type: "button", click: () => this.#turn(-1) }, "Earlier items");
    this.after = make("button", { type: "button", click: () => this.#turn(1) }, "Later items");
    this.element = make("div", {}, this.name, this.told, this.done, this.refused, this.progress, this.waits, this.cards.element, make("div", { class: "fields" }, this.retry, this.cancel, this.export), make("h2", {}, "What failed, and why"), this.errors.element, make("h2", {}, "Items"), make("p", { class: "soft" }, MARKS_ARE), this.jobs.element, make("div", { class: "fields" }, this.before, this.after));
    this.stop = this.#poll();
  }

  close() {
    this.stop();
    this.#leaving.abort();
  }

  #poll() {
    const complain = (message) => {
      if (this.told.textContent !== message) this.told.textContent = message;
    };
    return poll(EVERY_S, (signal) => this.#ask(signal), (found) => this.#show(found), complain);
  }

  /** Of a batch that is over, jobs and errors are asked for once. */
  async #ask(signal) {
    const page = encodeURIComponent(this.#pages.at(-1));
    const found = await get(this.path, { signal });
    const version = `${page} ${JSON.stringify(found)}`;
    if (!found.is_ended || version !== this.#seen.version) {
      const [jobs, errors] = await Promise.all([get(`${this.path}/jobs?page=${page}`, { signal }), get(`${this.path}/errors`, { signal })]);
      this.#seen = { version, jobs, errors };
    }
    return { found, ...this.#seen };
  }

  #show({ found, jobs, errors }) {
    const title = `Batch ${found.key || found.batch_id}`;
    if (this.name.textContent !== title) this.name.textContent = title;
    const { counts, totals } = found;
    this.progress.max = counts.total || 1;
    this.progress.value = ended(found);
    this.cards.show({ State: found.state, Items: counts.total, Waiting: counts.queued, Running: counts.running, Done: counts.done, Failed: counts.failed, "Given up (dead)": counts.dead, Cancelled: counts.cancelled, "Marked texts": markedOf(found), "Shared, skipped": `${totals.shared}, ${totals.skipped}` });
    const waits = whyWaiting(found);
    if (this.waits.textContent !== waits) this.waits.textContent = waits;
    this.retry.disabled = !found.may_retry || (!counts.failed && !counts.dead);
    this.cancel.disabled = found.is_ended;
    this.errors.show(errors.errors.map((group) => [`${group.state} ${group.code} ${group.message}`, [group.message || "no reason was given", group.code, group.state, group.count, group.such_as.join(", ")]]));
    this.jobs.show(jobs.jobs.map((job) => [job.job_id, this.#row(job)]));
    this.#next = jobs.next_page;
    this.before.disabled = this.#pages.length < 2;
    this.after.disabled = !this.#next;
  }

  #row(job) {
    const page = this.#pages.at(-1);
    const href = `#/batch/${encodeURIComponent(this.id)}/item/${encodeURIComponent(job.job_id)}/${encodeURIComponent(page)}`;
    return [link(job.custom_id, href), job.state, job.error || job.progress, job.figures?.usage.completion_tokens ?? "", notesOf(job).join(", "), job.attempts + job.crashes];
  }

  #turn(step) {
    if (step < 0) this.#pages.pop();
    else this.#pages.push(this.#next);
    this.stop();
    this.stop = this.#poll();
  }

  async #do(verb, question, query = "") {
    if (!confirm(question)) return;
    this.refused.textContent = "";
    try {
      const said = await post(`${this.path}/${verb}${query}`, undefined, { body: "", headers: {} });
      this.done.textContent = verb === "retry" ? `${said.retried} items wait again` : "it is being cancelled";
    } catch (error) {
      this.refused.textContent = error.message;
    }
  }

  /** All jobs, page by page, as a file. */
  async #export() {
    const { signal } = this.#leaving;
    const pieces = [];
    this.refused.textContent = "";
    try {
      for (let page = ""; page !== null; ) {
        const found = await get(`${this.path}/jobs?page=${encodeURIComponent(page)}`, { signal });
        pieces.push(...found.jobs.map((job) => `${JSON.stringify(job)}\n`));
        page = found.next_page;
        this.done.textContent = `${pieces.length} items`;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.refused.textContent = error.message;
      return;
    }
    const url = URL.createObjectURL(new Blob(pieces, { type: "application/x-ndjson" }));
    make("a", { href: url, download: `${this.id}.jsonl` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }
}
