// Everything works without this script. It reads pages anew, moves through rows by keys, and shows streams.
"use strict";

const main = () => document.getElementById("main");
const isTyping = () => /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");

// Reading anew: the same address, and only what stands in <main>. Not while somebody types or selects there.
const refreshMs = 1000 * Number(document.body.dataset.refreshS || 0);
let isPaused = false;

function say(state, text) {
  const live = document.getElementById("live");
  if (live) { live.dataset.state = state; live.textContent = text; }
}

// What somebody chose or typed and has not sent yet.
const isFilled = () => [...main().querySelectorAll("input, textarea, option")].some((one) => {
  if (one.tagName !== "OPTION") return one.value !== one.defaultValue || one.checked !== one.defaultChecked;
  return one.selected && !one.defaultSelected && (one.index > 0 || one.parentElement.querySelector("[selected]"));
});

function isInUse() {
  const selected = getSelection();
  return isTyping() || isFilled() || document.querySelector("dialog[open]") || main().querySelector("[data-stream], details[open]")
    || (selected && !selected.isCollapsed);
}

async function readAnew() {
  if (isPaused || document.hidden || isInUse()) return;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "error" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("main");
    if (!fresh || isPaused || isInUse()) return;
    const at = rowIndex;
    const focused = document.activeElement?.getAttribute?.("href");
    main().replaceChildren(...fresh.childNodes);
    if (focused) main().querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    if (at >= 0) markRow(at, false);
    openStream();
    say("on", `read at ${new Date().toISOString().slice(11, 19)}`);
    if (page.body.dataset.refreshS === undefined) clearInterval(timer);
  } catch {
    say("off", "the console does not answer");
  }
}

const timer = refreshMs ? setInterval(readAnew, refreshMs) : 0;
document.addEventListener("visibilitychange", () => { if (refreshMs && !document.hidden) readAnew(); });

function pause() {
  if (!refreshMs) return;
  isPaused = !isPaused;
  say(isPaused ? "off" : "on", isPaused ? "paused: p goes on" : "reading anew");
  if (!isPaused) readAnew();
}

// The text of a job while it is decoded. A page that nobody sees holds no stream open.
let stream = null;

function closeStream() {
  stream?.close();
  stream = null;
}

function openStream() {
  const text = main().querySelector("[data-stream]");
  if (!text || stream || document.hidden) return;
  const state = document.getElementById("stream-state");
  stream = new EventSource(text.dataset.stream);
  stream.addEventListener("waits", (event) => {
    state.textContent = JSON.parse(event.data).is_claimed
      ? "A worker has it. A job that is not streamed shows its text at its end."
      : "No worker has claimed it.";
  });
  stream.addEventListener("text", (event) => {
    const news = JSON.parse(event.data);
    if (news.add === undefined) text.textContent = news.text;
    else text.append(news.add);
    state.textContent = "It is being decoded.";
  });
  stream.addEventListener("end", (event) => {
    closeStream();
    delete text.dataset.stream;
    state.textContent = `It ended: ${JSON.parse(event.data).status}.`;
    readAnew();
  });
  stream.addEventListener("refused", (event) => {
    closeStream();
    state.textContent = `No stream: ${JSON.parse(event.data).reason}.`;
  });
}

openStream();
document.addEventListener("visibilitychange", () => { if (document.hidden) closeStream(); else openStream(); });

// A file that is too large is refused before it is sent.
document.addEventListener("change", (event) => {
  const most = Number(event.target.dataset.maxMb || 0);
  if (!most) return;
  const isTooLarge = [...event.target.files].some((file) => file.size > most * 1e6);
  event.target.setCustomValidity(isTooLarge ? `Expected a file of at most ${most} MB.` : "");
  event.target.reportValidity();
});

// Rows by keys.
let rowIndex = -1;
const rows = () => [...main().querySelectorAll("tbody tr")];

function markRow(index, isShown = true) {
  const all = rows();
  if (!all.length) return;
  all.forEach((row) => row.classList.remove("at"));
  rowIndex = Math.max(0, Math.min(index, all.length - 1));
  all[rowIndex].classList.add("at");
  if (isShown) {
    all[rowIndex].scrollIntoView({ block: "nearest" });
    all[rowIndex].querySelector("a")?.focus({ preventScroll: true });
  }
}

let isGoing = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping()) return;
  const key = event.key;
  if (isGoing) {
    isGoing = false;
    const link = document.querySelector(`nav a[data-key="${CSS.escape(key)}"]`);
    if (link) { event.preventDefault(); link.click(); }
    return;
  }
  const search = main().querySelector("input[type=search]");
  if (key === "g") isGoing = true;
  else if (key === "j") markRow(rowIndex + 1);
  else if (key === "k") markRow(rowIndex - 1);
  else if (key === "p") pause();
  else if (key === "/" && search) { event.preventDefault(); search.focus(); search.select(); }
  else if (key === "?") document.getElementById("keys").showModal();
});

const opener = document.getElementById("keys-open");
opener.hidden = false;
opener.addEventListener("click", () => document.getElementById("keys").showModal());
