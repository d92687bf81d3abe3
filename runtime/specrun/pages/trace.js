"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { tokens, rounds, names } = data;
  const KINDS = ["plain", "accepted", "correction", "bonus"];
  const [ID, ORIGIN, ROUND, LOGPROB, TOP, PART, SAID] = [0, 1, 2, 3, 4, 5, 6];
  const [ASKED, PROPOSAL, ACCEPTED, OWN, FIRST, EMITTED, DRAFT_MS, VERIFY_MS] = [0, 1, 2, 3, 4, 5, 6, 7];
  const PAGE = 20; // rounds that are in the document at once
  const text = document.getElementById("tokens");
  const panel = document.getElementById("token");
  const details = document.getElementById("details");
  const list = document.getElementById("list");
  const hidden = new Set();
  const element = (index) => document.getElementById(`t${index}`);
  const name = (id) => names[id];
  const said = (index) => tokens[index][SAID] || name(tokens[index][ID]);

  /** An element with attributes and children; texts are texts and never HTML. */
  function make(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  // One token.

  const percent = (logprob) => {
    const share = 100 * Math.exp(logprob);
    return share >= 0.05 ? `${share.toFixed(1)} %` : "below 0.1 %";
  };

  /** What a token is, in words. */
  function described(index) {
    const token = tokens[index];
    const parts = [said(index), data.origins[token[ORIGIN]].toLowerCase()];
    if (token[PART]) parts.push(`part ${token[PART][0]} of ${token[PART][1]} of a character`);
    if (token[ROUND] >= 0) parts.push(`round ${token[ROUND] + 1} of ${rounds.length}`);
    if (token[LOGPROB] !== null) parts.push(percent(token[LOGPROB]));
    const refused = refusedBy(index);
    if (refused !== null) parts.push(`in place of ${name(refused)}`);
    return parts.join(", ");
  }

  /** The draft that this token replaced. */
  function refusedBy(index) {
    const token = tokens[index];
    if (KINDS[token[ORIGIN]] !== "correction" || token[ROUND] < 0) return null;
    const round = rounds[token[ROUND]];
    return round[PROPOSAL][round[ACCEPTED]];
  }

  function chip(kind, label) {
    return make("span", { class: `chip ${kind}` }, label);
  }

  function pair(term, ...value) {
    return [make("dt", {}, term), make("dd", {}, ...value)];
  }

  function alternatives(token) {
    if (data.alternatives === null || data.alternatives === undefined) {
      return make("p", { class: "soft" }, "Alternatives were not asked for.");
    }
    if (!token[TOP].length) return null;
    const bars = make("ul", { class: "bars", "aria-label": "Most probable tokens" });
    for (const [id, logprob] of token[TOP]) {
      const share = percent(logprob);
      const chosen = id === token[ID];
      const meter = make("meter", { min: 0, max: 1, "aria-hidden": "true" });
      meter.value = Math.exp(logprob);
      const label = make("span", { class: "name" }, name(id));
      bars.append(make("li", { class: chosen ? "chosen" : null }, label,
        make("span", {}, chosen ? `${share}, in the text` : share), meter));
    }
    return make("div", {}, make("h3", {}, "Most probable to the target"), bars);
  }

  function show(index) {
    const token = tokens[index];
    const facts = make("dl");
    facts.append(...pair("from", chip(KINDS[token[ORIGIN]], data.origins[token[ORIGIN]])));
    const refused = refusedBy(index);
    if (refused !== null) facts.append(...pair("in place of", chip("rejected", name(refused))));
    if (token[ROUND] >= 0) {
      const round = rounds[token[ROUND]];
      const at = index - round[FIRST] + 1;
      facts.append(...pair("round", `${token[ROUND] + 1} of ${rounds.length}, token ${at} of ${round[EMITTED]}`));
    } else if (index === 0) {
      facts.append(...pair("round", "none: reading the prompt gave it"));
    } else {
      facts.append(...pair("round", "broke off before it was told"));
    }
    if (token[PART]) facts.append(...pair("part", `${token[PART][0]} of ${token[PART][1]} of what became text together`));
    if (token[LOGPROB] !== null) {
      facts.append(...pair("probability", `${percent(token[LOGPROB])} (log ${token[LOGPROB].toFixed(2)})`));
    }
    facts.append(...pair("token", `${index + 1} of ${tokens.length}, id ${token[ID]}`));
    const opener = token[ROUND] < 0 ? null : make("button", { type: "button" }, `Show round ${token[ROUND] + 1}`);
    if (opener) opener.addEventListener("click", () => showRound(token[ROUND]));
    const word = make("p", {}, chip(KINDS[token[ORIGIN]], said(index)));
    details.replaceChildren(...[word, facts, alternatives(token), opener].filter((part) => part !== null));
    panel.classList.remove("idle");
    mark(index);
  }

  let marked = [];
  function mark(index) {
    for (const old of marked) old.classList.remove("same");
    const round = tokens[index][ROUND];
    marked = [];
    if (round < 0) return;
    for (let at = rounds[round][FIRST]; at < rounds[round][FIRST] + rounds[round][EMITTED]; at++) {
      const span = element(at);
      span.classList.add("same");
      marked.push(span);
    }
  }

  // The text: one stop of the tab key, arrows inside.

  let at = 0; // where the arrows go on
  let chosen = false; // whether somebody went there: the mouse shows others only for a while

  function choose(index, { focus = true } = {}) {
    const old = element(at);
    old.tabIndex = -1;
    old.classList.remove("at");
    old.removeAttribute("aria-selected");
    at = index;
    chosen = true;
    const span = element(index);
    span.tabIndex = 0;
    span.classList.add("at");
    span.setAttribute("aria-selected", "true");
    span.setAttribute("aria-label", described(index));
    if (focus) span.focus({ preventScroll: false });
    show(index);
    if (focus) uncover(span);
  }

  /** On a phone the panel lies over the lower end of the window. */
  function uncover(span) {
    if (getComputedStyle(panel).position !== "fixed") return;
    document.body.classList.add("sheet");
    const free = window.innerHeight - panel.offsetHeight;
    const box = span.getBoundingClientRect();
    if (box.bottom > free) window.scrollBy(0, box.bottom - free + 24);
  }

  const open = (index) => !hidden.has(KINDS[tokens[index][ORIGIN]]);

  function next(from, step) {
    for (let index = from + step; index >= 0 && index < tokens.length; index += step) {
      if (open(index)) return index;
    }
    return from;
  }

  /** The first token of the next or the last round, of those that are not hidden. */
  function nextRound(from, step) {
    let round = tokens[from][ROUND];
    for (round += step; round >= 0 && round < rounds.length; round += step) {
      const first = rounds[round][FIRST];
      for (let index = first; index < first + rounds[round][EMITTED]; index++) {
        if (open(index)) return index;
      }
    }
    return round < 0 && open(0) ? 0 : from;
  }

  const KEYS = {
    ArrowRight: () => next(at, 1),
    ArrowLeft: () => next(at, -1),
    ArrowDown: () => nextRound(at, 1),
    ArrowUp: () => nextRound(at, -1),
    Home: () => next(-1, 1),
    End: () => next(tokens.length, -1),
  };

  const indexOf = (target) => {
    const span = target.closest(".t");
    return span ? Number(span.id.slice(1)) : -1;
  };

  if (tokens.length) {
    element(0).tabIndex = 0;
    text.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key === "Enter") {
        if (tokens[at][ROUND] >= 0) showRound(tokens[at][ROUND]);
      } else if (event.key === "Escape") {
        close();
      } else if (KEYS[event.key]) {
        const to = KEYS[event.key]();
        if (to >= 0 && to < tokens.length) choose(to);
      } else return;
      event.preventDefault();
    });
    text.addEventListener("focusin", (event) => {
      const index = indexOf(event.target);
      if (index >= 0) choose(index, { focus: false });
    });
    text.addEventListener("click", (event) => {
      const index = indexOf(event.target);
      if (index >= 0) choose(index);
    });
    text.addEventListener("pointerover", (event) => {
      const index = indexOf(event.target);
      if (index >= 0 && event.pointerType === "mouse") show(index);
    });
    text.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && chosen) show(at);
    });
  }

  function close() {
    chosen = false;
    panel.classList.add("idle");
    document.body.classList.remove("sheet");
    details.replaceChildren(make("p", { class: "soft" }, "Choose a token of the text."));
  }
  document.getElementById("close").addEventListener("click", () => {
    if (tokens.length) element(at).focus({ preventScroll: true });
    close(); // after the focus, which shows the token again
  });

  // The legend hides and shows.

  for (const button of document.querySelectorAll("[data-origin]")) {
    button.addEventListener("click", () => {
      const origin = button.dataset.origin;
      const shown = hidden.has(origin);
      if (shown) hidden.delete(origin);
      else hidden.add(origin);
      button.setAttribute("aria-pressed", String(shown));
      text.classList.toggle(`hide-${origin}`, !shown);
    });
  }

  const rejected = document.getElementById("show-rejected");
  rejected.checked = false;
  rejected.addEventListener("change", () => {
    for (const old of text.querySelectorAll(".rejected")) old.remove();
    if (!rejected.checked) return;
    for (const round of rounds) {
      const refused = refusedOf(round);
      if (!refused.length) continue;
      const label = refused.map(name).join("").replaceAll("␣", " ");
      // Rounds tell the same in words, so a screen reader does without these.
      const shown = make("span", { class: "rejected", "aria-hidden": "true" }, label);
      element(round[FIRST] + round[ACCEPTED]).before(shown);
    }
  });

  // Rounds.

  const whole = (round) => round[EMITTED] > round[ACCEPTED];
  const refusedOf = (round) => (whole(round) ? round[PROPOSAL].slice(round[ACCEPTED]) : []);
  const milliseconds = (value) => `${value.toFixed(value < 10 ? 2 : 1)} ms`;

  function summary(number) {
    const round = rounds[number];
    const count = round[PROPOSAL].length;
    const stood = Math.min(round[ACCEPTED], round[EMITTED]);
    const drafts = count ? `${stood} of ${count} drafts stood` : "nothing drafted";
    const times = `draft ${milliseconds(round[DRAFT_MS])}, verify ${milliseconds(round[VERIFY_MS])}`;
    const plural = round[EMITTED] === 1 ? "token" : "tokens";
    let gave = "";
    for (let at = round[FIRST]; at < round[FIRST] + round[EMITTED]; at++) gave += element(at).textContent;
    return [
      make("strong", {}, `Round ${number + 1}`),
      `: ${drafts}, ${round[EMITTED]} ${plural}`,
      make("small", { class: "soft" }, times),
      make("q", { dir: "auto" }, gave.replaceAll("\n", "⏎").trim()),
    ];
  }

  function draftItem(kind, label, id) {
    return make("li", {}, chip(kind, name(id)), make("small", {}, label));
  }

  function inside(number) {
    const round = rounds[number];
    const box = make("div", { class: "inside" });
    const items = make("ol", { class: "drafts", "aria-label": "Drafts, and the target's own token" });
    const kept = Math.min(round[ACCEPTED], round[EMITTED]);
    round[PROPOSAL].forEach((id, place) => {
      if (place < kept) items.append(draftItem("accepted", "accepted", id));
      else if (whole(round)) items.append(draftItem("rejected", "rejected", id));
      else items.append(draftItem("unread", "behind the end", id));
    });
    if (whole(round)) {
      const own = KINDS[tokens[round[FIRST] + round[EMITTED] - 1][ORIGIN]];
      items.append(draftItem(own, own === "plain" ? "plain" : own, round[OWN]));
    }
    const back = make("button", { type: "button" }, "Show in the text");
    back.addEventListener("click", () => choose(round[FIRST]));
    box.append(items, back);
    return box;
  }

  let start = 0; // the first round in the document
  function fill(from) {
    start = Math.max(0, Math.min(from, Math.floor((rounds.length - 1) / PAGE) * PAGE));
    const end = Math.min(start + PAGE, rounds.length);
    const items = [];
    for (let number = start; number < end; number++) {
      const box = make("details", { id: `r${number}` }, make("summary", {}, ...summary(number)));
      box.addEventListener("toggle", () => {
        if (box.open && box.childElementCount === 1) box.append(inside(number));
      });
      items.push(make("li", {}, box));
    }
    list.replaceChildren(...items);
    list.start = start + 1;
    document.getElementById("earlier").disabled = start === 0;
    document.getElementById("later").disabled = end === rounds.length;
    document.getElementById("which").textContent = `${start + 1} to ${end} of ${rounds.length}`;
    setAll(false);
  }

  const all = document.getElementById("open-all");
  function setAll(shown) {
    all.setAttribute("aria-expanded", String(shown));
    all.textContent = shown ? "Close these" : "Open these";
    for (const box of list.querySelectorAll("details")) box.open = shown;
  }

  function showRound(number) {
    if (number < start || number >= start + PAGE) fill(Math.floor(number / PAGE) * PAGE);
    const box = document.getElementById(`r${number}`);
    box.open = true;
    const head = box.querySelector("summary");
    head.focus();
    uncover(head);
  }

  if (list) {
    fill(0);
    document.getElementById("earlier").addEventListener("click", () => fill(start - PAGE));
    document.getElementById("later").addEventListener("click", () => fill(start + PAGE));
    all.addEventListener("click", () => setAll(all.getAttribute("aria-expanded") !== "true"));
    list.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || event.target.tagName !== "SUMMARY") return;
      const heads = [...list.querySelectorAll("summary")];
      const to = heads[heads.indexOf(event.target) + step];
      if (to) to.focus();
      event.preventDefault();
    });
  }
})();
