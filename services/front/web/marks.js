// What a timeline shows of one caption. Knows no screen: traced events in, bars in seconds out.

/** Marks of one kind that are kept; beyond it the older half is forgotten, so that a page may stay open for days. */
export const MOST_MARKS = 20_000;

const PREPARING = ["receive", "decode", "queued", "encode", "prefill"];

export class Marks {
  /** `began_s`: when it was asked for, on the page's clock; `drafted`: whether a draft may take part. */
  constructor(began_s, drafted) {
    this.began_s = began_s;
    this.drafted = drafted;
    this.passes = [];
    this.drafts = [];
    this.restarts = [];
    this.stages = []; // of the target and the gateway: {name, from_s, to_s}
    this.draft = null; // from the first work of the draft to its readiness
    this.draftStages = []; // the same in parts, where the server has said how long they took
    this.offset_s = Infinity; // the page's clock less the gateway's, as of the fastest message
    this.end_s = 0;
    this.mostTokens = 1;
    this.counts = { passes: 0, judged: 0, accepted: 0, written: 0, stale: 0, restarts: 0 };
  }

  /** One event of the stream's `slipstream` object, heard at `now_s` of the page's clock. */
  add(said, now_s) {
    const at_s = now_s - this.began_s;
    this.end_s = Math.max(this.end_s, at_s);
    if (said.trace) this.#trace(said.trace, at_s);
    else if (said.stage) this.#stage(said.stage, at_s);
    else if (said.stages) this.#refine(said.stages);
  }

  /** The caption has ended, well or not. */
  end(now_s) {
    this.#closeStage(now_s - this.began_s);
    if (this.draft && this.draft.to_s === null) this.draft = null; // it never came
  }

  /** Seconds since the request, of a time on the gateway's clock. */
  at(gateway_s) {
    return gateway_s + this.offset_s;
  }

  #trace(trace, at_s) {
    this.offset_s = Math.min(this.offset_s, at_s - trace.at_s);
    const counts = this.counts;
    if (trace.kind === "pass") {
      keep(this.passes, trace);
      this.mostTokens = Math.max(this.mostTokens, trace.tokens + 1);
      counts.passes += 1;
      counts.judged += trace.tokens;
      counts.accepted += trace.accepted;
    } else if (trace.kind === "draft") {
      keep(this.drafts, trace);
      counts.written += trace.tokens;
      counts.stale += trace.stale ? trace.tokens : 0;
    } else {
      keep(this.restarts, trace);
      counts.restarts += 1;
    }
  }

  #stage({ stage }, at_s) {
    if (PREPARING.includes(stage) && this.#openStage()?.name !== stage) {
      this.#closeStage(at_s);
      keep(this.stages, { name: stage, from_s: at_s, to_s: null });
      if (this.drafted && !this.draft && (stage === "encode" || stage === "prefill")) this.draft = { from_s: at_s, to_s: null };
    } else if (stage === "generate") {
      this.#closeStage(at_s);
    } else if (stage === "draft_ready" && this.draft) {
      this.draft.to_s = at_s;
    } else if (stage === "draft_missing" || stage === "draft_lost") {
      if (this.draft && this.draft.to_s === null) this.draft = null;
    }
  }

  #openStage() {
    const last = this.stages.at(-1);
    return last && last.to_s === null ? last : null;
  }

  #closeStage(at_s) {
    const open = this.#openStage();
    if (open) open.to_s = at_s;
  }

  /** The draft's preparation in its parts, which end with its readiness. */
  #refine(stages) {
    if (!this.draft || this.draft.to_s === null) return;
    let to_s = this.draft.to_s;
    for (const [key, name] of [["draft_prefill_s", "prefill"], ["draft_prune_s", "prune"], ["draft_guidance_s", "guidance"], ["draft_encode_s", "encode"]]) {
      const from_s = to_s - (stages[key] || 0);
      if (stages[key]) this.draftStages.unshift({ name, from_s, to_s });
      to_s = from_s;
    }
  }
}

function keep(list, mark) {
  list.push(mark);
  if (list.length > MOST_MARKS) list.splice(0, MOST_MARKS / 2);
}

/** The index of the first mark that ends at `at_s` or later. */
export function firstFrom(list, at_s) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].at_s < at_s) low = middle + 1;
    else high = middle;
  }
  return low;
}
