"use strict";
// The page of Berth. It draws what the server sends and judges nothing: states, words and sentences come from the diagnosis.
const KI = 1024, MI = KI * 1024, GI = MI * 1024;
const MIN = 60, HOUR = 3600, DAY = 86400;

/* ---------------------------------------------------------------- store */
// Rows by id, and sections by name, as the stream brings them. `seen` is when the last message came; `skew` what our clock is off.
const store = { rows: new Map(), sections: {}, version: 0, loading: null, ready: false, skew: 0, seen: 0, lost: 0, denied: false };
const page = { query: new URLSearchParams(), stop: [], update: null, theme: "auto" };
const now = () => (store.sections.about?.recorded || Date.now() + store.skew);
const since = (ms) => Math.max(0, (now() - ms) / 1000);
const section = (name, other) => store.sections[name] ?? other;
const linkTo = (id) => (id.startsWith("/") ? `#/pv/${encodeURIComponent(id.slice(1))}` : `#/volume/${id.split("/").map(encodeURIComponent).join("/")}`);
const all = () => [...store.rows.values()];

function take(message) {
  store.seen = Date.now();
  store.skew = message.now - Date.now();
  if (message.loading) { if (!store.ready) { store.loading = message.loading; frame.ask(route); } return; }
  const first = !store.ready;
  if (message.all) store.rows = new Map(message.rows.map((row) => [row.id, row]));
  else {
    for (const row of message.rows) store.rows.set(row.id, row);
    for (const id of message.gone) store.rows.delete(id);
  }
  Object.assign(store.sections, message.sections);
  Object.assign(store, { version: message.version, ready: true, loading: null });
  const ids = new Set([...message.rows.map((row) => row.id), ...message.gone]);
  frame.ask(chrome);
  if (first || !page.update) frame.ask(route); else { const update = page.update; frame.ask(() => { if (page.update === update) update(message.all ? null : ids, new Set(Object.keys(message.sections))); }); }
}

let source = null, tries = 0, timer = 0, next = 0;
function connect() {
  clearTimeout(timer);
  source?.close();
  source = new EventSource("/api/live");
  source.onmessage = (event) => {
    const was = store.lost;
    tries = 0; store.lost = 0;
    take(JSON.parse(event.data));
    if (was) frame.ask(chrome);
  };
  source.onerror = async () => {
    source.close();
    store.lost ||= Date.now();
    const wait = Math.min(8, 2 ** tries++);
    next = Date.now() + wait * 1000;
    timer = setTimeout(connect, wait * 1000);
    frame.ask(chrome);
    // A stream does not say why it ended: without the right token there is no use in trying.
    try { if ((await fetch("/page.css")).status === 401) { clearTimeout(timer); store.denied = true; frame.ask(route); } } catch { /* nobody answers: tried again */ }
  };
}
async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(answer.status);
  return answer.json();
}

/* ---------------------------------------------------------------- helpers */
const $ = (q, el = document) => el.querySelector(q);
// Elements are built, never parsed: a name with markup in it stays text. Styles go through CSSOM, as a strict CSP wants.
function make(el, props, kids) {
  for (const [k, v] of Object.entries(props || {})) {
    if (v === null || v === undefined || v === false) continue;
    if (k.startsWith("on")) el.addEventListener(k.slice(2), v);
    else if (k === "style") for (const [p, x] of Object.entries(v)) el.style.setProperty(p, x);
    else el.setAttribute(k, v === true ? "" : v);
  }
  for (const kid of kids.flat(9)) if (kid !== null && kid !== undefined && kid !== false) el.append(kid.nodeType ? kid : String(kid));
  return el;
}
const h = (tag, props, ...kids) => make(document.createElement(tag), props, kids);
const s = (tag, props, ...kids) => make(document.createElementNS("http://www.w3.org/2000/svg", tag), props, kids);

const NB = "\u00a0";
const fix = (n, d) => n.toFixed(d);
const thousands = (n) => Math.round(n).toString().replace(/\B(?=(\d{3})+$)/g, ",");
function bytes(n) {
  if (n === null || n === undefined) return "–";
  const [v, u] = n >= 1024 * GI ? [n / GI / 1024, "TiB"] : n >= GI ? [n / GI, "GiB"] : n >= MI ? [n / MI, "MiB"] : [n / KI, "KiB"];
  return `${v >= 100 || Math.abs(v - Math.round(v)) < 0.05 ? Math.round(v) : fix(v, 1)}${NB}${u}`;
}
const quantity = (n) => (n >= 1024 * GI && n % (1024 * GI) === 0 ? `${n / GI / 1024}Ti` : n >= GI ? `${Math.round(n / GI)}Gi` : `${Math.round(n / MI)}Mi`);
function took(ms) {
  if (ms < 100) return `${fix(ms, 1)}${NB}ms`;
  if (ms < 1000) return `${Math.round(ms)}${NB}ms`;
  if (ms < 60000) return `${fix(ms / 1000, 2)}${NB}s`;
  return span(ms / 1000);
}
/** Two units at most: 14 min 12 s, 3 h 6 min, 12 d. */
function span(sec) {
  sec = Math.round(sec);
  const two = (a, ua, b, ub) => `${a}${NB}${ua}` + (b ? `${NB}${b}${NB}${ub}` : "");
  if (sec < MIN) return `${sec}${NB}s`;
  if (sec < HOUR) return two(Math.floor(sec / MIN), "min", sec % MIN, "s");
  if (sec < DAY) return two(Math.floor(sec / HOUR), "h", Math.floor((sec % HOUR) / MIN), "min");
  return `${Math.floor(sec / DAY)}${NB}d`;
}
const age = (sec) => span(sec < MIN ? sec : sec < HOUR ? sec - (sec % MIN) : sec < DAY ? sec - (sec % HOUR) : sec);
const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const clock = (ms) => new Date(ms).toISOString().slice(11, 19);
const when = (ms, fine) => (now() - ms < 20 * HOUR * 1000 ? new Date(ms).toISOString().slice(11, fine ? 23 : 19) : `${new Date(ms).toUTCString().slice(8, 11)}${NB}${new Date(ms).toUTCString().slice(5, 7)}`);
const sum = (list, f) => list.reduce((n, x) => n + f(x), 0);

const SHAPES = {
  ok: "M5 1a4 4 0 1 0 0 8a4 4 0 0 0 0-8Z",
  warn: "M5 .6L9.8 9.2H.2Z",
  bad: "M5 0L10 5L5 10L0 5Z",
  busy: "M5 1a4 4 0 1 0 0 8a4 4 0 0 0 0-8ZM5 2.4a2.6 2.6 0 0 1 0 5.2Z",
  wait: "M5 1a4 4 0 1 0 0 8a4 4 0 0 0 0-8ZM5 2.5a2.5 2.5 0 1 1 0 5a2.5 2.5 0 0 1 0-5Z",
  off: "M1 4.2h8v1.6H1Z",
};
const shape = (state) => s("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, s("path", { d: SHAPES[state], "fill-rule": "evenodd" }));
const glyph = (state) => h("i", null, shape(state));
const chip = (state, word) => h("span", { class: `st ${state}` }, glyph(state), word);
// `code` in a sentence of the data.
const prose = (text) => text.split("`").map((t, i) => (i % 2 ? h("code", null, t) : t));
const chevron = () => s("svg", { class: "chev", viewBox: "0 0 12 12", "aria-hidden": "true" }, s("path", { d: "M4 2.5L8 6L4 9.5" }));
const tick = (yes, text) => h("span", { class: yes ? "yes" : "no" }, s("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, s("path", { d: yes ? "M1 5.5L4 8.5L9 1.5" : "M1.5 1.5L8.5 8.5M8.5 1.5L1.5 8.5" })), h("span", null, h("span", { class: "sr" }, yes ? "yes: " : "no: "), text));

function say(text) { $("#say").textContent = text; }
function command(text) {
  const button = h("button", { type: "button", "aria-label": `Copy: ${text}`, onclick: async () => {
    try { await navigator.clipboard.writeText(text); } catch { /* the text can still be selected */ }
    button.textContent = "Copied"; say("Copied");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return h("div", { class: "cmd" }, h("code", null, text), button);
}

const level = (p) => (p >= 95 ? "bad" : p >= 90 ? "warn" : "");
function usage(part, whole, label) {
  if (part === null) return h("span", { class: "dim3", title: "Not mounted, or its node or server does not answer" }, "unknown");
  const p = (part / whole) * 100, l = level(p);
  return h("div", { class: "use", role: "img", "aria-label": `${label}: ${Math.round(p)} percent, ${bytes(part)} of ${bytes(whole)}`, title: `${bytes(part)} of ${bytes(whole)}` },
    h("div", { class: "bar" }, h("span", { class: l, style: { width: `${p}%` } })), h("span", { class: `num ${l}` }, `${p > 99 && p < 100 ? 99 : Math.round(p)}${NB}%`));
}

/* One tooltip for the page; shown for the pointer and for the keyboard. */
const tip = {
  show(at, content) {
    const el = $("#tip");
    el.replaceChildren(content);
    el.hidden = false;
    const a = at.getBoundingClientRect(), b = el.getBoundingClientRect();
    el.style.left = `${Math.max(8, Math.min(a.left + a.width / 2 - 24, innerWidth - b.width - 8))}px`;
    el.style.top = `${a.bottom + b.height + 16 < innerHeight ? a.bottom + 8 : a.top - b.height - 8}px`;
  },
  hide() { $("#tip").hidden = true; },
};
const tipped = (make) => ({ onmouseenter: (e) => tip.show(e.currentTarget, make()), onfocus: (e) => tip.show(e.currentTarget, make()), onmouseleave: tip.hide, onblur: tip.hide });

/* Everything that changes asks for one repaint in the next frame. */
const frame = { jobs: new Set(), ask(job) { if (!this.jobs.size) requestAnimationFrame(() => { const jobs = [...this.jobs]; this.jobs.clear(); for (const j of jobs) j(); }); this.jobs.add(job); } };

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const volumeLink = (v) => linkTo(v.id);

/* ---------------------------------------------------------------- overview */
const nameOf = (row) => (row.ns ? row.id : row.claim);
function attention(a) {
  return h("li", null,
    chip(a.state, a.word),
    h("div", { class: "body-a" },
      h("h2", { class: "h3" }, h("a", { href: a.id ? linkTo(a.id) : `#/${a.to}` }, a.name.startsWith("/") ? a.name.slice(1) : a.name)),
      h("p", { class: "why" }, a.why, a.todo ? h("span", { class: "todo" }, " ", a.todo) : ""),
      a.cmd.map(command)),
    h("span", { class: "since", title: "for how long" }, a.since ? age(since(a.since)) : ""));
}

function overview() {
  const holder = h("div");
  function draw() {
    const list = section("attention", []), rows = all(), classes = section("classes", []), drivers = section("drivers", []), nodes = section("nodes", []), calls = section("calls", null);
    const bad = list.filter((a) => a.state === "bad").length, claims = rows.filter((v) => v.ns);
    const phases = ["Bound", "Pending", "Terminating", "Lost"].map((p) => [p, claims.filter((v) => v.phase === p).length]);
    const title = list.length ? `${list.length} thing${list.length === 1 ? " needs" : "s need"} attention` : "Nothing needs attention";
    const recent = section("recent", []);
    const calm = phases[1][1] ? `${phases[1][1]} claims wait for a pod or are being made; nothing is stuck.` : "All claims are bound, all drivers are registered, no volume is nearly full.";
    holder.replaceChildren(
      h("div", { class: "title" }, h("h1", { tabindex: -1 }, title), h("span", { class: "meta" }, list.length ? `${bad} now, ${list.length - bad} soon. Worst first.` : calm)),
      h("div", { class: "cols" },
        h("div", null,
          list.length ? h("section", { "aria-label": "What needs attention" }, h("ol", { class: "attn" }, list.slice(0, 100).map(attention))) : null,
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Last changes"), h("span", { class: "meta" }, "newest first")),
            recent.length ? h("ul", { class: "rows" }, recent.map((x) => h("li", { style: { "grid-template-columns": "64px minmax(0,1fr)" } }, h("span", { class: "dim3" }, when(x.at)), h("span", null, h("a", { href: linkTo(x.id) }, x.id), " ", h("span", { class: "dim" }, x.say)))))
              : h("p", { class: "dim" }, "Nothing has changed since this page began to watch."))),
        h("aside", { "aria-label": "At a glance" },
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Capacity"), h("span", { class: "meta" }, "used of provisioned, free")),
            h("ul", { class: "rows" }, classes.map((c) => h("li", { style: { "grid-template-columns": "minmax(0,1fr) auto 72px" } },
              h("a", { class: "cut", href: `#/volumes?cls=${encodeURIComponent(c.name)}` }, c.name),
              h("span", { class: "num" }, c.used === null ? h("span", { class: "dim3", title: "No node reports how full its volumes are" }, "not reported") : bytes(c.used), h("span", { class: "dim3" }, ` of ${bytes(c.prov)}`)),
              h("span", { class: "num dim3", title: c.free === null ? "The driver does not say" : "The driver can still make this much" }, c.free === null ? "–" : bytes(c.free)),
              h("div", { class: "bar", style: { "grid-column": "1 / -1", height: "4px" } },
                c.free === null || !(c.prov + c.free) ? null : h("span", { class: "prov", style: { width: `${(c.prov / (c.prov + c.free)) * 100}%` } }),
                c.used === null || !(c.prov + (c.free || 0)) ? null : h("span", { style: { width: `${Math.min(100, (c.used / (c.prov + (c.free || 0))) * 100)}%` } })))))),
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Claims"), h("span", { class: "meta" }, thousands(claims.length))),
            h("div", { class: "seg", role: "img", "aria-label": phases.map((p) => `${p[1]} ${p[0]}`).join(", ") }, phases.filter((p) => p[1]).map((p) => h("span", { style: { flex: p[1], background: p[0] === "Bound" ? "var(--fill)" : p[0] === "Lost" ? "var(--bad)" : "var(--warn-fill)" } }))),
            h("div", { class: "legend" }, phases.map((p) => h("span", null, h("b", null, thousands(p[1])), " ", p[0])))),
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Drivers"), h("span", { class: "meta" }, "nodes, p95 of calls")),
            h("ul", { class: "rows" }, drivers.map((d) => { const ok = d.on > 0 && d.on >= d.all; return h("li", { style: { "grid-template-columns": "minmax(0,1fr) 56px 64px" } },
              h("span", { class: `st ${ok ? "ok" : "warn"}`, style: { "font-weight": "400" } }, glyph(ok ? "ok" : "warn"), h("a", { class: "cut", href: "#/nodes" }, d.name)),
              h("span", { class: "num" }, `${d.on} of ${d.all}`), h("span", { class: "num dim3" }, d.calls?.p95 ? took(d.calls.p95) : "–")); }))),
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Nodes")),
            h("ul", { class: "rows" }, nodes.slice(0, 12).map((n) => h("li", { style: { "grid-template-columns": "minmax(0,1fr) auto" } }, chip(n.ready ? "ok" : "bad", n.name), h("span", { class: "dim num" }, counted(n.volumes, "volume")))))),
          h("section", null, h("div", { class: "sec" }, h("h2", null, "CSI calls"), h("span", { class: "meta" }, "per minute, last hour")),
            calls ? spark(calls) : h("p", { class: "dim" }, "Not seen: only berth up on this machine keeps the calls of drivers.")))));
  }
  draw();
  return { title: "Overview", node: holder, update: draw };
}
function spark(calls) {
  const most = Math.max(1, ...calls.map((c) => c[0])), y = (n) => (n / most) * 38, made = sum(calls, (c) => c[0]), failed = sum(calls, (c) => c[1]);
  return [s("svg", { class: "spark", viewBox: "0 0 300 40", preserveAspectRatio: "none", role: "img", "aria-label": `${made} calls in the last hour, ${failed} failed` },
    calls.map(([n, f], i) => [n ? s("rect", { x: i * 5, y: 40 - y(n), width: 4, height: y(n) }) : null, f ? s("rect", { class: "f", x: i * 5, y: 40 - y(f), width: 4, height: y(f) }) : null])),
  h("div", { class: "legend" }, h("span", null, h("b", null, thousands(made)), " calls"), h("span", null, h("b", null, failed), " failed"))];
}

/* ---------------------------------------------------------------- volumes */
const COLUMNS = [
  ["state", "State", (v) => RANK[v.state[0]]], ["claim", "Claim", (v) => v.id], ["pod", "Pod", (v) => v.pod || "~"], ["node", "Node", (v) => v.node || "~"],
  ["class", "Class", (v) => v.cls], ["size", "Size", (v) => v.size], ["used", "Used", (v) => (v.used === null ? -1 : v.used / (v.cap || v.size || 1))],
  ["ino", "Inodes", (v) => (v.inodesUsed === null ? -1 : v.inodesUsed / v.inodes)], ["phase", "Phase", (v) => v.phase], ["age", "Age", (v) => -v.created],
];
const RANK = { bad: 0, warn: 1, busy: 2, wait: 3, off: 4, ok: 5 };
const NUMERIC = new Set(["size", "ino", "age"]);

function volumes() {
  const q = page.query;
  const view = { q: q.get("q") || "", only: q.get("only") || "all", cls: q.get("cls") || "", node: q.get("node") || "", sort: q.get("sort") || "state" };
  let rows = [], active = 0, drawn = "";
  const body = h("div", { role: "rowgroup" });
  const count = h("span", { class: "meta", role: "status" });
  const heads = new Map();
  const tests = { all: () => true, attention: (v) => v.trouble, waiting: (v) => v.phase === "Pending", unused: (v) => v.unused || v.phase === "Released" };

  function compute() {
    const words = view.q.toLowerCase().split(/\s+/).filter(Boolean);
    const volumes = all();
    rows = volumes.filter((v) => tests[view.only](v) && (!view.cls || v.cls === view.cls) && (!view.node || v.node === view.node)
      && words.every((w) => `${v.id} ${v.pod} ${v.node} ${v.cls} ${v.pv} ${v.phase} ${v.state[1]}`.toLowerCase().includes(w)));
    const down = view.sort.startsWith("-"), key = view.sort.replace("-", ""), f = COLUMNS.find((c) => c[0] === key)[2];
    rows.sort((a, b) => { const x = f(a), y = f(b); return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1) || (a.trouble && b.trouble ? a.rank - b.rank : 0) || (a.id < b.id ? -1 : 1); });
    active = Math.min(active, Math.max(0, rows.length - 1));
    count.textContent = rows.length === volumes.length ? thousands(rows.length) : `${thousands(rows.length)} of ${thousands(volumes.length)}`;
    grid.setAttribute("aria-rowcount", rows.length + 1);
    for (const [k, th] of heads) { const on = k === key; th[on ? "setAttribute" : "removeAttribute"]("aria-sort", down ? "descending" : "ascending"); $(".arrow", th).textContent = on ? (down ? "↓" : "↑") : ""; }
    const p = new URLSearchParams();
    for (const [k, d] of [["q", ""], ["only", "all"], ["cls", ""], ["node", ""], ["sort", "state"]]) if (view[k] !== d) p.set(k, view[k]);
    history.replaceState(null, "", `#/volumes${p.size ? "?" + p : ""}`);
    drawn = "";
    frame.ask(draw);
  }
  function row(v, i) {
    const [st, word] = v.state;
    const cell = (c, ...kids) => h("div", { role: "gridcell", class: `c-${c}${NUMERIC.has(c) ? " num" : ""} cut` }, ...kids);
    const p = v.inodesUsed === null ? null : (v.inodesUsed / v.inodes) * 100;
    return h("div", { class: "tr", role: "row", "aria-rowindex": i + 2, tabindex: i === active ? 0 : -1, "data-i": i, onclick: (e) => { if (e.target.tagName !== "A" && !getSelection().toString()) location.hash = volumeLink(v); } },
      cell("state", chip(st, word)),
      cell("claim", h("a", { class: "name", href: volumeLink(v), tabindex: -1, title: nameOf(v) }, v.ns ? h("span", { class: "ns" }, v.ns, "/") : null, v.claim)),
      cell("pod", v.pod ? (v.pods > 1 ? `${v.pod}, +${v.pods - 1}` : v.pod) : h("span", { class: "dim3" }, "–")), cell("node", v.node || h("span", { class: "dim3" }, "–")), cell("class", h("span", { class: "dim" }, v.cls)),
      cell("size", quantity(v.size)), cell("used", v.used === null ? h("span", { class: "dim3" }, v.pod && v.pv ? "not reported" : "–") : usage(v.used, v.cap || v.size, "Used")),
      cell("ino", p === null ? h("span", { class: "dim3" }, "–") : level(p) ? chip(level(p), `${Math.round(p)}${NB}%`) : `${Math.round(p)}${NB}%`),
      cell("phase", h("span", { class: "dim" }, v.phase)), cell("age", age(since(v.created))),
      h("div", { class: "k cut", "aria-hidden": "true" }, `${quantity(v.size)}, ${v.cls}`, v.node ? `, ${v.node}` : ""));
  }
  // Only the rows in sight exist. Their heights are fixed, so the page's own scrollbar stays true.
  function draw() {
    const high = innerWidth <= 840 ? 68 : 32;
    const top = body.getBoundingClientRect().top;
    const from = Math.max(0, Math.floor(-top / high) - 6), to = Math.min(rows.length, Math.ceil((innerHeight - top) / high) + 6);
    if (drawn === `${from} ${to} ${high}`) return;
    drawn = `${from} ${to} ${high}`;
    const had = document.activeElement?.dataset?.i;
    body.style.paddingTop = `${from * high}px`;
    body.style.paddingBottom = `${(rows.length - to) * high}px`;
    body.replaceChildren(...rows.slice(from, to).map((v, i) => row(v, from + i)));
    if (had !== undefined) $(`[data-i="${had}"]`, body)?.focus({ preventScroll: true });
    if (!rows.length) body.replaceChildren(h("div", { class: "blank" }, h("h2", null, "No volume matches"), h("p", null, "Clear the filter, or look for a part of a claim, pod, node, class or volume name."), h("button", { class: "btn", type: "button", onclick: () => { Object.assign(view, { q: "", only: "all", cls: "", node: "" }); search.value = ""; selects.forEach((x) => { x.value = ""; }); pressed(); compute(); } }, "Clear the filter")));
  }
  // A change repaints its own row, and only if that row is in sight; rows that come, go or move are sorted in again.
  function update(ids) {
    if (!ids) return compute();
    const known = new Set(rows.map((v) => v.id));
    if ([...ids].some((id) => known.has(id) !== store.rows.has(id)) || ids.size > 50) return compute();
    const before = rows.map((v) => v.id).join();
    rows = rows.map((v) => store.rows.get(v.id));
    if (view.sort !== "claim" || view.only !== "all" || view.q) { compute(); if (rows.map((v) => v.id).join() !== before) return undefined; }
    for (const id of ids) { const i = rows.findIndex((v) => v.id === id), el = $(`[data-i="${i}"]`, body); if (el && el !== document.activeElement) el.replaceWith(row(rows[i], i)); }
    return undefined;
  }
  function move(to) {
    active = Math.max(0, Math.min(rows.length - 1, to));
    const high = innerWidth <= 840 ? 68 : 32, top = body.getBoundingClientRect().top + active * high, head = innerWidth <= 840 ? 88 : 80;
    if (top < head) scrollBy(0, top - head); else if (top + high > innerHeight) scrollBy(0, top + high - innerHeight + 8);
    drawn = ""; draw();
    $(`[data-i="${active}"]`, body)?.focus({ preventScroll: true });
  }
  const keys = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 15, PageUp: -15, Home: -1e9, End: 1e9 };
  body.addEventListener("keydown", (e) => {
    if (e.key in keys) { e.preventDefault(); move(active + keys[e.key]); }
    if (e.key === "Enter" && rows[active]) location.hash = volumeLink(rows[active]);
  });
  const search = h("input", { class: "field", id: "filter", type: "search", placeholder: "Filter by claim, pod, node, class, volume", "aria-label": "Filter volumes", value: view.q, autocomplete: "off", spellcheck: "false",
    oninput: () => { view.q = search.value; compute(); }, onkeydown: (e) => { if (e.key === "ArrowDown") { e.preventDefault(); move(0); } } });
  const pills = [["all", "All"], ["attention", "Need attention"], ["waiting", "Pending"], ["unused", "Unused"]].map(([k, t]) =>
    h("button", { type: "button", "data-k": k, onclick: () => { view.only = k; pressed(); compute(); } }, t));
  const pressed = () => pills.forEach((b) => b.setAttribute("aria-pressed", b.dataset.k === view.only));
  const select = (key, label, values) => h("select", { "aria-label": label, onchange: (e) => { view[key] = e.target.value; compute(); } }, h("option", { value: "" }, label), values.map((x) => h("option", { value: x, selected: view[key] === x }, x)));
  const selects = [select("cls", "Every class", section("classes", []).map((c) => c.name)), select("node", "Every node", section("nodes", []).map((n) => n.name))];
  pressed();
  const head = h("div", { class: "tr th", role: "row", "aria-rowindex": 1 }, COLUMNS.map(([key, name]) => {
    const th = h("div", { role: "columnheader", class: `c-${key}${NUMERIC.has(key) ? " num" : ""}` }, h("button", { type: "button", onclick: () => { const big = ["size", "used", "ino", "age"].includes(key); view.sort = view.sort === key ? `-${key}` : view.sort === `-${key}` ? key : big ? `-${key}` : key; compute(); } }, name, h("span", { class: "arrow", "aria-hidden": "true" })));
    heads.set(key, th);
    return th;
  }));
  const onscroll = () => frame.ask(draw);
  addEventListener("scroll", onscroll, { passive: true }); addEventListener("resize", onscroll);
  page.stop.push(() => { removeEventListener("scroll", onscroll); removeEventListener("resize", onscroll);});
  const grid = h("div", { class: "tbl vt", role: "grid", "aria-label": "Volumes" }, head, body);
  compute();
  return { title: "Volumes", after: draw, update, node: [
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, "Volumes"), count),
    h("div", { class: "tools", role: "search" }, search, h("div", { class: "pills", role: "group", "aria-label": "Show" }, pills), selects),
    grid] };
}
/* ---------------------------------------------------------------- a volume */
const MILESTONES = ["CREATED", "NODE_READY", "VOL_READY", "PUBLISHED"];
const color = (who) => `var(--c-${who})`;

function chain(boxes) {
  const out = [];
  boxes.forEach(({ kind, name, state, word, detail, broken }, i) => {
    if (i) {
      out.push(s("svg", { class: `lk${broken ? ` ${state}` : ""}`, viewBox: "0 0 28 16", "aria-hidden": "true" },
        s("path", { d: "M4 8H23", "stroke-dasharray": broken || state === "wait" ? "3 3" : null }), broken ? s("path", { d: "M10 4L18 12M18 4L10 12" }) : s("path", { d: "M19 4L23 8L19 12" })));
    }
    out.push(h("div", { class: `box ${state === "bad" || state === "warn" || state === "wait" ? state : ""}`, role: "listitem" }, h("div", { class: "kind" }, kind), h("div", { class: "nm cut", title: name }, name), chip(state, word), h("div", { class: "dt cut", title: detail }, detail)));
  });
  return h("div", { class: "chain", role: "list", "aria-label": "From class to pod" }, out);
}

/** Maps time to 0…1. Long waits, in which nobody worked, can be drawn short. */
function timeScale(steps, end, shorten) {
  const busy = steps.filter((x) => x.t !== null).map((x) => [x.t, x.t + x.d]).sort((a, b) => a[0] - b[0]);
  const parts = [];
  for (const [a, b] of busy) { const last = parts[parts.length - 1]; if (last && a <= last[1]) last[1] = Math.max(last[1], b); else parts.push([a, b]); }
  const work = sum(parts, ([a, b]) => b - a);
  const gaps = [];
  let prev = 0;
  for (const [a, b] of [...parts, [end, end]]) { if (a - prev > Math.max(work, end * 0.004) * 0.12) gaps.push([prev, a]); prev = Math.max(prev, b); }
  const waited = sum(gaps, ([a, b]) => b - a);
  const canShorten = waited > end * 0.3;
  if (!shorten || !canShorten) return { x: (t) => t / end, gaps: [], waited, canShorten };
  const g = Math.max(0.02, Math.min(0.05, 0.42 / gaps.length)), rest = 1 - g * gaps.length, shown = end - waited;
  const x = (t) => {
    let at = 0, from = 0;
    for (const [a, b] of gaps) {
      if (t <= a) return at + ((t - from) / shown) * rest;
      at += ((a - from) / shown) * rest;
      if (t < b) return at + ((t - a) / (b - a)) * g;
      at += g; from = b;
    }
    return at + ((t - from) / shown) * rest;
  };
  return { x, gaps, waited, canShorten: true };
}
function nice(raw) { const mag = 10 ** Math.floor(Math.log10(raw)); return [1, 2, 5, 10].map((m) => m * mag).find((m) => m >= raw * 0.999); }
function axis(scale, end) {
  if (scale.gaps.length) {
    const at = [0, ...scale.gaps.map((g) => g[1]).filter((t) => t < end)], out = [];
    for (const [i, t] of at.entries()) {
      const to = scale.gaps[i]?.[0] ?? end, wide = scale.x(to) - scale.x(t);
      if (!out.length || scale.x(t) - scale.x(out[out.length - 1]) > 0.13) out.push(t);
      if (wide > 0.2) { const by = nice((to - t) / (wide / 0.12)); for (let x = Math.ceil(t / by) * by; x < to; x += by) if (scale.x(x) - scale.x(out[out.length - 1]) > 0.1) out.push(x); }
    }
    return out.filter((t) => t === 0 || scale.x(t) < 0.72);
  }
  const stepBy = nice(end / 5);
  return Array.from({ length: Math.floor(end / stepBy + 1e-9) + 1 }, (_, i) => i * stepBy);
}
const axisText = (t, end) => (t === 0 ? "0" : t < 1000 && (end < 1000 || t < 100) ? `${+fix(t, t < 10 ? 1 : 0)}${NB}ms` : t < 60000 ? `${+fix(t / 1000, t < 10000 ? 1 : 0)}${NB}s` : span(t / 1000));

function waterfall(v, ep, onCall) {
  const end = ep.open ? Math.max(1, now() - ep.begin) : lasts(ep) * 1.02;
  const lines = [];
  for (const x of ep.steps) {
    const key = `${x.who} ${x.what} ${x.node || ""}`;
    let line = lines.find((l) => l.key === key);
    if (!line) lines.push((line = { key, who: x.who, what: x.what, node: x.node, parts: [] }));
    line.parts.push(x);
  }
  const holder = h("div"), most = Math.max(...lines.map((l) => ep.open || l.who === "you" ? -1 : sum(l.parts, (x) => x.d || 0)));
  let shorten = true, narrow;
  function render() {
    narrow = innerWidth < 600;
    const sc = timeScale(ep.steps, end, shorten);
    const pc = (f) => `${(f * 100).toFixed(3)}%`;
    const ticks = axis(sc, end);
    const rows = lines.map((line, i) => {
      const last = line.parts[line.parts.length - 1], spent = sum(line.parts, (x) => x.d || 0);
      const lane = [];
      line.parts.forEach((x, n) => {
        if (x.t === null) { lane.push(h("div", { class: "wf-note", style: { left: pc(Math.min(0.5, 0)) } }, h("span", null, x.waits))); return; }
        const next = line.parts[n + 1];
        const a = sc.x(x.t), b = sc.x(x.t + x.d);
        const until = x.err ? (next ? next.t : ep.open && line.parts.length > 1 ? end : null) : null;
        if (until !== null) lane.push(h("div", { class: "wf-back", style: { left: pc(b), width: pc(sc.x(until) - b) } }));
        lane.push(h("button", { type: "button", class: `wf-b${x.err ? " failed" : ""}`, style: { left: pc(a), width: pc(b - a), background: color(x.who) }, tabindex: n === line.parts.length - 1 ? 0 : -1,
          "aria-label": `${x.who}, ${x.what}${x.attempt ? `, attempt ${x.attempt}` : ""}: began after ${took(x.t)}, took ${took(x.d)}${x.err ? `, failed: ${x.code}` : x.reach ? `, reached ${x.reach}` : ""}`,
          onclick: (e) => { if (e.pointerType !== "touch") onCall(x); },
          ...tipped(() => h("div", null, h("div", { class: "h" }, x.what), h("dl", null,
            h("dt", null, "by"), h("dd", null, x.who, x.node ? ` on ${x.node}` : ""), h("dt", null, "began"), h("dd", null, `${clock(ep.begin + x.t)}, after ${took(x.t)}`), h("dt", null, "took"), h("dd", null, took(x.d)),
            x.call ? [h("dt", null, "code"), h("dd", null, x.code || "OK")] : null, x.attempt ? [h("dt", null, "attempt"), h("dd", null, `${x.attempt} of ${line.parts.length}`)] : null,
            x.reach ? [h("dt", null, "reached"), h("dd", null, x.reach)] : null, x.note ? [h("dt", null, "note"), h("dd", null, x.note)] : null), x.err ? h("div", { class: "e" }, x.err) : null)) }));
        // The label of a milestone stands right of its bar; where there is no room, in it; else left of it.
        if (x.reach) { const side = b <= (narrow ? 0.7 : 0.8) ? "" : b - a > (narrow ? 0.32 : 0.25) ? "in" : "left"; lane.push(h("span", { class: `wf-m ${side}`, style: { left: pc(side === "left" ? a : b) } }, shape("ok"), x.reach)); }
      });
      const fails = line.parts.filter((x) => x.err).length;
      return h("div", { class: "wf-r", role: "row" },
        h("div", { class: "wf-who", role: "rowheader" }, h("span", { class: "sw", style: { background: color(line.who) } }), h("span", { class: "w" }, line.who), h("span", { class: "cut", title: line.what }, line.what)),
        h("div", { class: "wf-lane", role: "cell" }, lane),
        h("div", { class: `wf-took${spent === most ? " longest" : ""}`, title: spent === most ? "The longest step" : null, role: "cell" }, last.t === null ? h("span", { class: "dim3" }, "–") : fails > 1 ? h("span", { class: "st bad" }, `${fails} failed`) : took(spent)));
    });
    const milestones = lines.flatMap((line, i) => line.parts.filter((x) => x.reach).map((x) => h("div", { class: "mile", style: { left: pc(sc.x(x.t + x.d)), "--i": i + 0.5 } })));
    const places = [["controllers", ["scheduler", "pv-controller", "attach-detach"]], ["sidecars", ["provisioner", "attacher", "resizer", "snapshotter"]], ["node", ["volume-manager", "node"]]];
    holder.replaceChildren(
      h("div", { class: "wf", role: "table", "aria-label": `${ep.name}, step by step` },
        h("div", { class: "wf-h", role: "row" }, h("span", { role: "columnheader" }, "Who did what"), h("div", { class: "axis", role: "columnheader", "aria-label": "Time" },
          ticks.map((t, i) => h("span", { class: i === 0 ? "first" : sc.x(t) > 0.9 ? "last" : "", style: { left: pc(sc.x(t)) } }, axisText(t, end))), ep.open ? h("span", { class: "last", style: { left: "100%" } }, `now, ${took(end)}`) : null), h("span", { role: "columnheader", class: "num" }, "Took")),
        h("div", { class: "wf-grid", "aria-hidden": "true" }, ticks.slice(1).map((t) => h("div", { class: "tick", style: { left: pc(sc.x(t)) } })),
          sc.gaps.map(([a, b]) => h("div", { class: "gap", title: `Nobody worked for ${took(b - a)}`, style: { left: pc(sc.x(a)), width: pc(sc.x(b) - sc.x(a)) } }, h("span", null, axisText(b - a, Infinity)))), milestones),
        rows),
      h("div", { class: "wf-foot" },
        places.filter(([, list]) => lines.some((l) => list.includes(l.who))).map(([name, list]) => h("span", { class: "key" }, list.filter((w) => lines.some((l) => l.who === w)).map((w) => h("i", { style: { background: color(w) } })), name)),
        ep.steps.some((x) => x.err) ? [h("span", { class: "key" }, h("i", { class: "f" }), "failed attempt"), h("span", { class: "key" }, h("i", { class: "d" }), "waits before the next")] : null,
        sc.canShorten ? h("label", { class: "check", style: { "margin-left": "auto" } }, h("input", { type: "checkbox", checked: shorten, onchange: (e) => { shorten = e.target.checked; render(); } }), `Draw waits short (${took(sc.waited)} in which nobody worked)`) : null));
  }
  render();
  // The observer ends with the element.
  new ResizeObserver(() => { if (narrow !== innerWidth < 600) render(); }).observe(holder);
  return holder;
}

const lasts = (ep) => Math.max(0.001, ...ep.steps.map((x) => (x.t || 0) + (x.d || 0)));
function milestones(detail, ep) {
  const any = ep.steps.some((x) => x.reach) || ep.open;
  if (!any) return h("p", { class: "dim", style: { "margin-bottom": "12px" } }, `Took ${took(lasts(ep))}.`);
  return h("ol", { class: "steps", "aria-label": "Milestones" }, MILESTONES.map((m) => {
    const x = ep.steps.find((y) => y.reach === m);
    const fails = ep.steps.filter((y) => y.err).length;
    const [st, t] = x ? ["ok", `after ${took(x.t + x.d)}`] : ep.had?.[m] ? ["ok", `${age(since(ep.had[m]))} ago`] : m === "NODE_READY" && !detail.attaches ? ["off", "not needed"] : ep.fails === m ? ["bad", fails ? `not reached, ${counted(fails, "attempt")}` : "not reached"] : ["wait", "not yet"];
    return h("li", { class: st }, glyph(st), h("div", { class: "ms" }, m), h("div", { class: "t" }, t));
  }));
}

/** A request or answer as the driver's messages print themselves, one field per line; a secret is the word *removed* in a frame. */
function pretty(text) {
  let depth = 0, quoted = false, line = "";
  const lines = [], end = () => { if (line.trim()) lines.push("  ".repeat(depth) + line.trim()); line = ""; };
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (c === "\"" && text[i - 1] !== "\\") quoted = !quoted;
    if (quoted) { line += c; continue; }
    const opens = c === "{" || c === "[" || c === "(", closes = c === "}" || c === "]" || c === ")";
    if (opens && /^[}\])]/.test(text.slice(i + 1).trimStart())) { const to = text.indexOf(text.slice(i + 1).trimStart()[0], i); line += c + text[to]; i = to; } else if (opens) { line += c; end(); depth++; } else if (closes) { end(); depth--; line += c; } else if (c === ",") { line += c; end(); } else line += c;
  }
  end();
  return lines.join("\n").split("***stripped***").flatMap((t, i) => (i ? [h("span", { class: "gone", title: "Berth removes secrets before it keeps a call" }, "removed"), t] : [t]));
}

/** The same call with the same failure many times is one row. */
function folded(calls) {
  const rows = [];
  for (const c of calls) {
    const last = rows[rows.length - 1];
    if (last && c.code !== "OK" && last.code === c.code && last.what === c.what) (last.same ||= []).push(c);
    else rows.push({ ...c });
  }
  return rows;
}

function callRows(calls) {
  return calls.map((c, i) => {
    const n = (c.same?.length || 0) + 1, id = `call-${i}`, bad = c.code !== "OK";
    const box = h("div", { class: "body", id, hidden: true });
    const button = h("button", { type: "button", class: "tr", "aria-expanded": "false", "aria-controls": id, onclick: () => {
      const open = box.hidden;
      box.hidden = !open; button.setAttribute("aria-expanded", open);
      if (open && !box.childNodes.length) make(box, null, [
        c.err ? h("p", { class: "full err" }, c.err) : null,
        n > 1 ? h("div", { class: "full" }, h("h3", null, `${n} attempts with the same answer, newest first`), h("div", { class: "att" }, [c, ...c.same].map((x) => h("span", null, `${clock(x.at)}, ${took(x.took)}`)))) : null,
        h("div", null, h("h3", null, "Request"), h("pre", { class: "json", tabindex: 0, "aria-label": "Request" }, pretty(c.request))),
        h("div", null, h("h3", null, bad ? "Status" : "Response"), h("pre", { class: "json", tabindex: 0, "aria-label": "Response" }, c.response ? pretty(c.response) : `${c.code}${c.err ? `: ${c.err}` : ""}`)),
      ]);
    } }, chevron(), h("span", { class: "t-at dim3" }, when(c.at, true)), h("span", { class: "t-who dim" }, c.who), h("span", { class: "t-m cut" }, c.what, n > 1 ? h("span", { class: "times" }, `× ${n}`) : null), h("span", { class: `t-code code cut ${bad ? "bad" : "ok"}` }, c.code), h("span", { class: "t-took num" }, took(c.took)));
    button.dataset.call = c.what + c.code;
    return [button, box];
  });
}

function usageChart(v, detail) {
  const pts = detail.usage, size = v.cap || v.size, rate = detail.rate;
  if (v.used === null) return h("p", { class: "dim" }, v.pod && v.pv ? "No node reports how full it is." : "No node has the volume mounted, so nobody measures it.");
  const eta = rate > 0 ? (size - v.used) / rate : Infinity;
  const text = h("p", { class: "chart-say" }, h("b", null, `${bytes(v.used)} of ${bytes(size)}`), eta < 96 ? `, ${bytes(rate)} more every hour. Full in ${span(eta * HOUR)}.` : rate === null ? "." : `, ${bytes(Math.max(0, rate * 24))} more in a day.`);
  const inodes = h("p", { class: "dim3" }, v.inodes ? `Inodes ${Math.round((v.inodesUsed / v.inodes) * 100)} % of ${thousands(v.inodes)}` : "Inodes not reported");
  if (pts.length < 2) return [text, usage(v.used, size, "Used"), h("p", { class: "dim3", style: { "margin-top": "8px" } }, "Measured since this page was opened, every 30 s."), inodes];
  const holder = h("div", { class: "chart" });
  function draw() {
    const w = holder.clientWidth || 360, high = 152, left = 56, right = 4, top = 16, bottom = 20;
    const t0 = pts[0][0], t1 = pts[pts.length - 1][0], range = Math.max(1, t1 - t0), ahead = eta < 24 ? Math.min(range * 0.25, eta * HOUR * 1000) : 0;
    const X = (t) => left + ((t - t0) / (range + ahead)) * (w - left - right), Y = (b) => top + (1 - Math.min(1, b / size)) * (high - top - bottom);
    const line = pts.map(([t, b], i) => `${i ? "L" : "M"}${fix(X(t), 1)} ${fix(Y(b), 1)}`).join("");
    const cross = s("g", { visibility: "hidden" }, s("line", { class: "cross", y1: top, y2: high - bottom }), s("circle", { class: "dot", r: 4 }), s("text", { y: 10 }));
    holder.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${high}`, height: high, role: "slider", tabindex: 0, "aria-label": `Used bytes, last ${span(range / 1000)}`, "aria-valuemin": 0, "aria-valuemax": pts.length - 1, "aria-valuenow": pts.length - 1, "aria-valuetext": `now ${bytes(v.used)} of ${bytes(size)}` },
      [0, 0.5, 1].map((f) => [s("line", { class: f === 1 ? "cap" : "grid", x1: left, x2: w - right, y1: Y(f * size), y2: Y(f * size) }), s("text", { x: left - 6, y: Y(f * size) + 4, "text-anchor": "end" }, f ? bytes(f * size) : "0")]),
      s("text", { x: X(t0), y: high - 4 }, when(t0)), s("text", { x: X(t1), y: high - 4, "text-anchor": ahead ? "middle" : "end" }, "now"),
      s("path", { class: "area", d: `${line}L${X(t1)} ${Y(0)}L${X(t0)} ${Y(0)}Z` }), s("path", { class: "ln", d: line }),
      ahead ? s("path", { class: "fc", d: `M${X(t1)} ${Y(v.used)}L${X(t1 + ahead)} ${Y(v.used + (rate * ahead) / HOUR / 1000)}` }) : null, cross));
    const svg = holder.firstChild;
    let at = pts.length - 1;
    const point = (i) => {
      at = Math.max(0, Math.min(pts.length - 1, i));
      const [t, b] = pts[at], x = X(t), label = `${clock(t)}, ${bytes(b)}, ${Math.round((b / size) * 100)} %`, [l, c, words] = cross.childNodes;
      cross.setAttribute("visibility", "visible");
      l.setAttribute("x1", x); l.setAttribute("x2", x); c.setAttribute("cx", x); c.setAttribute("cy", Y(b)); words.textContent = label; words.setAttribute("x", left);
      svg.setAttribute("aria-valuenow", at); svg.setAttribute("aria-valuetext", label);
    };
    svg.addEventListener("pointermove", (e) => { const b = svg.getBoundingClientRect(), t = t0 + ((((e.clientX - b.left) / b.width) * w - left) / (w - left - right)) * (range + ahead); frame.ask(() => point(pts.findLastIndex((p) => p[0] <= t))); });
    svg.addEventListener("pointerleave", () => cross.setAttribute("visibility", "hidden"));
    svg.addEventListener("keydown", (e) => { const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[e.key]; if (by) { e.preventDefault(); point(at + by); } });
    svg.addEventListener("blur", () => cross.setAttribute("visibility", "hidden"));
  }
  const seen = new ResizeObserver(() => frame.ask(draw));
  seen.observe(holder); page.stop.push(() => seen.disconnect());
  return [text, holder, inodes];
}

function tree(node, v) {
  const here = node.id === v.id && node.kind === "claim";
  return h("li", null, h("div", { class: "nd" }, h("span", { class: "cut" }, h("span", { class: "t" }, node.kind, " "), here ? h("b", { "aria-current": "true" }, node.name) : node.id ? h("a", { href: linkTo(node.id) }, node.name) : node.name), h("span", null, node.state ? [chip(...node.state), " "] : null, h("span", { class: "dim3" }, node.size))), node.kids?.length ? h("ul", null, node.kids.map((k) => tree(k, v))) : null);
}

/* What may be done to a claim, where the page was started with --allow-actions. */
async function act(body, done, failed) {
  try {
    const answer = await fetch("/api/act", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    const said = await answer.json();
    if (answer.ok) done(said.said); else failed(said.error);
  } catch (error) { failed(String(error)); }
}
function dialog(title, kids, go, label, danger) {
  const said = h("p", { class: "said", role: "status" });
  const run = h("button", { class: `btn ${danger ? "danger" : "primary"}`, type: "button", onclick: () => { run.disabled = true; go((text) => { box.close(); say(text); }, (text) => { run.disabled = false; said.className = "said bad"; said.textContent = text; }); } }, label);
  const box = h("dialog", { "aria-labelledby": "dlg", onclose: () => box.remove() }, h("h2", { id: "dlg" }, title), kids, said, h("div", { class: "row" }, h("button", { class: "btn", type: "button", onclick: () => box.close() }, "Cancel"), run));
  document.body.append(box); box.showModal(); $("input", box)?.focus();
  return run;
}
const asUser = () => h("p", { class: "dim" }, "Done with your own rights, as: ", h("code", null, section("about").user), ". The same as:");
function confirmDelete(v) {
  const input = h("input", { class: "field", "aria-label": "Name of the claim", autocomplete: "off", oninput: () => { go.disabled = input.value !== v.claim; } });
  const go = dialog(`Delete ${v.id}?`, [
    h("p", null, v.reclaim === "Delete" ? `Its volume and ${v.used === null ? "all" : bytes(v.used)} of data go with it. This cannot be undone.` : "The policy is Retain: the volume and its data stay, without a claim."),
    v.pod ? h("p", null, `The pod ${v.pod} uses it. The claim stays Terminating until that pod is gone.`) : null, asUser(), command(`kubectl delete pvc ${v.claim} -n ${v.ns}`),
    h("p", { style: { "margin-top": "12px" } }, "Type ", h("b", null, v.claim), " to go on."), input,
  ], (done, failed) => act({ action: "delete", id: v.id, confirm: input.value }, done, failed), "Delete claim and data", true);
  go.disabled = true;
}
function askFor(v, action, label, value, title, key, help) {
  const input = h("input", { class: "field", "aria-label": label, autocomplete: "off", spellcheck: "false", value });
  dialog(title, [h("p", null, help), h("p", { class: "dim" }, "Done with your own rights, as: ", h("code", null, section("about").user), "."), input],
    (done, failed) => act({ action, id: v.id, [key]: input.value }, done, failed), title.split(" ")[0]);
}
const stamp = () => new Date(now()).toISOString().slice(0, 16).replace(/[-:T]/g, "").slice(4);

function volume(id) {
  const holder = h("div");
  let detail = null, picked = null, asking = false, again = false, opened = new Set();
  const gone = () => holder.replaceChildren(h("div", { class: "blank" }, h("h1", { tabindex: -1 }, "No such volume"), h("p", null, `There is no claim or volume ${id.replace(/^\//, "")}. It may have been deleted while this page was open.`), h("a", { href: "#/volumes" }, "All volumes")));
  async function fetchIt() {
    if (asking) { again = true; return; }
    asking = true;
    try { detail = await ask(`/api/volume?id=${encodeURIComponent(id)}`); draw(); } catch (error) { if (error.message === "404") gone(); }
    asking = false;
    if (again) { again = false; fetchIt(); }
  }
  function draw() {
    const v = detail.row, [st, word] = v.state, t = v.trouble, eps = detail.episodes, calls = folded(detail.calls), events = detail.events;
    const focus = document.activeElement?.dataset?.call, scroll = scrollY;
    const mounted = v.pod ? `The pod ${v.pod} has it mounted${v.node ? ` on ${v.node}` : ""}.` : "No pod uses this claim.";
    const verdict = t ? h("div", { class: `verdict ${t.state}`, role: "note" }, glyph(t.state), h("p", null, h("b", null, t.why)), t.todo ? h("p", { class: "todo" }, t.todo) : null, t.cmd.map(command), t.evidence ? h("p", { class: "evid" }, "Evidence: ", t.evidence) : null)
      : h("div", { class: `verdict ${st === "ok" || st === "busy" ? "ok" : st}`, role: "note" }, glyph(st), h("p", null, v.wait || (st === "ok" ? `No problems found. ${mounted}` : v.unused ? "No problems found. No pod uses this claim." : `${word}.`)));
    const callList = callRows(calls);
    const openCall = (x) => { const b = callList.flat().find((e) => e.dataset?.call === x.what + (x.code || "OK")); if (b) { b.scrollIntoView({ block: "center" }); b.focus(); if (b.getAttribute("aria-expanded") === "false") b.click(); } };
    const life = h("div", { role: "tabpanel", id: "life", "aria-label": "Episode" });
    const tabs = eps.map((e, i) => h("button", { type: "button", role: "tab", "aria-controls": "life", onclick: () => pick(i), onkeydown: (ev) => { const d = { ArrowRight: 1, ArrowLeft: -1 }[ev.key]; if (d) { const n = (i + d + eps.length) % eps.length; pick(n); tabs[n].focus(); } } }, e.name, h("small", null, e.open ? `${span(since(e.begin))}, not finished` : `${took(lasts(e))}, ${age(since(e.begin))} ago`)));
    function pick(i) { picked = eps[i].begin; tabs.forEach((b, n) => { b.setAttribute("aria-selected", n === i); b.tabIndex = n === i ? 0 : -1; }); life.replaceChildren(milestones(detail, eps[i]), waterfall(v, eps[i], openCall)); }
    // The last time it was mounted, or is being mounted, is what people come for.
    if (eps.length) { const same = eps.findIndex((e) => e.begin === picked); pick(same >= 0 ? same : Math.max(0, eps.findLastIndex((e) => e.open || e.steps.some((x) => x.reach)))); }
    const about = section("about", {}), acts = about.actions && v.ns;
    const nobody = "Not seen: only berth up on this machine keeps the steps and calls of volumes. Objects and events are all that is known here.";
    holder.replaceChildren(
      h("nav", { class: "crumb", "aria-label": "Breadcrumb" }, h("a", { href: "#/volumes" }, "Volumes"), v.ns ? [" / ", h("a", { href: `#/volumes?q=${encodeURIComponent(`${v.ns}/`)}` }, v.ns)] : null),
      h("div", { class: "title", style: { "margin-bottom": "4px" } }, h("h1", { tabindex: -1 }, v.claim), chip(st, word), t?.since ? h("span", { class: "meta" }, `for ${span(since(t.since))}`) : null,
        h("div", { class: "end" }, acts ? [
          h("button", { class: "btn", type: "button", disabled: !detail.canExpand, title: detail.canExpand ? null : "The class does not allow it", onclick: () => askFor(v, "expand", "New size", quantity(v.size * 2), "Expand the claim", "size", `It asks for ${bytes(detail.asked)} now. Volumes only grow.`) }, "Expand"),
          h("button", { class: "btn", type: "button", disabled: !detail.canSnapshot, title: detail.canSnapshot ? null : "No VolumeSnapshotClass names its driver", onclick: () => askFor(v, "snapshot", "Name of the snapshot", `${v.claim}-${stamp()}`, "Snapshot the volume", "name", "The name of the VolumeSnapshot:") }, "Snapshot"),
          h("button", { class: "btn", type: "button", onclick: () => askFor(v, "clone", "Name of the new claim", `${v.claim}-copy`, "Clone the claim", "name", "A new claim of the same class and size, filled from this one:") }, "Clone"),
          h("button", { class: "btn danger", type: "button", onclick: () => confirmDelete(v) }, "Delete")]
          : h("span", { class: "dim3", title: "Start with --allow-actions to expand, snapshot, clone or delete with your own rights" }, "Read-only"))),
      h("dl", { class: "facts" }, [["size", quantity(v.size)], ["class", v.cls || "none"], ["access", v.mode], ["node", v.node || "none"], ["driver", v.driver || "none"], ["age", age(since(v.created))]].map(([k, x]) => h("div", null, h("dt", null, k), h("dd", null, x)))),
      verdict, detail.more.length ? h("ul", { class: "more", "aria-label": "Also" }, detail.more.map((m) => h("li", null, chip(m.state, ""), " ", m.why))) : "", chain(detail.chain),
      h("div", { class: "cols", style: { "margin-top": "24px" } },
        h("div", null,
          h("section", { "aria-labelledby": "h-life" }, h("div", { class: "sec", style: { "margin-bottom": "0" } }, h("h2", { id: "h-life" }, "Life")), eps.length ? [h("div", { class: "tabs", role: "tablist", "aria-label": "Episodes" }, tabs), life] : h("p", { class: "dim" }, detail.known ? "Nothing has happened yet." : nobody)),
          h("section", { "aria-labelledby": "h-calls" }, h("div", { class: "sec" }, h("h2", { id: "h-calls" }, "CSI calls"), h("span", { class: "meta" }, "newest first; secrets are removed before a call is kept")),
            calls.length ? h("div", { class: "tbl calls" }, h("div", { class: "tr th", "aria-hidden": "true" }, h("span"), h("span", null, "At"), h("span", null, "By"), h("span", null, "Call"), h("span", null, "Code"), h("span", { class: "num" }, "Took")), callList) : h("p", { class: "dim" }, detail.known ? "No driver has been called for this claim." : nobody)),
          h("section", { "aria-labelledby": "h-ev" }, h("div", { class: "sec" }, h("h2", { id: "h-ev" }, "Events")),
            events.length ? h("div", { class: "tbl plain ev", role: "table", "aria-label": "Events" }, h("div", { class: "tr th", role: "row" }, ["Last", "Type", "Reason and message"].map((x) => h("span", { role: "columnheader" }, x)), h("span", { class: "num", role: "columnheader" }, "Times")),
              events.map((e) => h("div", { class: "tr", role: "row" }, h("span", { class: "e-at dim3", role: "cell" }, when(e.at)), h("span", { class: "e-type", role: "cell" }, e.type === "Warning" ? chip("warn", "Warning") : chip("off", "Normal")), h("span", { class: "e-msg", role: "cell" }, h("span", { class: "why" }, e.reason), h("span", { class: "dim3" }, ` ${e.on}${e.by ? `, by ${e.by}` : ""}`), h("div", { class: "msg" }, e.msg)), h("span", { class: "e-n num dim", role: "cell" }, e.n)))) : h("p", { class: "dim" }, "None kept. Kubernetes forgets events after an hour."))),
        h("aside", { "aria-label": "About this volume" },
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Usage")), usageChart(v, detail)),
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Snapshots and clones")), detail.tree ? h("ul", { class: "tree" }, tree(detail.tree, v)) : h("p", { class: "dim" }, "None.")),
          h("section", null, h("div", { class: "sec" }, h("h2", null, "Details")), h("dl", { class: "dl" }, [["Volume", v.pv ? h("code", null, v.pv) : "not made yet"], ["Handle", detail.handle ? h("code", null, detail.handle) : "–"], ["Reclaim", v.reclaim], ["Binding", detail.binding || "–"], detail.server ? ["Server", h("code", null, detail.server)] : null].filter(Boolean).map(([k, x]) => [h("dt", null, k), h("dd", null, x)])), h("div", { style: { "margin-top": "8px" } }, command(v.ns ? `berth explain pvc/${v.claim} -n ${v.ns}` : `berth explain pv/${v.claim}`))))));
    // What was open stays open when something changes.
    for (const b of callList.flat()) if (b.dataset?.call) { if (opened.has(b.dataset.call)) b.click(); b.addEventListener("click", () => { if (b.getAttribute("aria-expanded") === "true") opened.add(b.dataset.call); else opened.delete(b.dataset.call); }); if (b.dataset.call === focus) b.focus({ preventScroll: true }); }
    document.title = `${v.claim}, Berth`;
    scrollTo(0, scroll);
  }
  if (store.rows.has(id)) holder.append(h("div", { class: "title" }, h("h1", { tabindex: -1 }, store.rows.get(id).claim), chip(...store.rows.get(id).state)));
  else gone();
  fetchIt();
  return { title: id.split("/")[1], node: holder, update: (ids) => { if (!ids || ids.has(id)) fetchIt(); } };
}
/* ---------------------------------------------------------------- flow */
const LANES = [["kubectl", "kubectl", "you"], ["pv-controller", "PV controller", "pv-controller"], ["scheduler", "scheduler", "scheduler"], ["provisioner", "provisioner", "provisioner"], ["attach-detach", "attach-detach", "attach-detach"], ["attacher", "attacher", "attacher"], ["resizer", "resizer", "resizer"], ["node", "node", "volume-manager"]];
const OBJECTS = [["sc", "StorageClass", "Class"], ["pvc", "Claim", "Claim"], ["pod", "Pod", "Pod"], ["pv", "Volume", "Volume"], ["va", "Attachment", "Attach."]];
const REACHED_AT = { CREATED: [3, 0], NODE_READY: [5, 0], VOL_READY: [7, -1], PUBLISHED: [7, 1] };
const IDLE = { total: 1, claim: "", pod: "", cls: "", driver: "", node: "", steps: [], begin: {} };

function flow() {
  let key = page.query.get("of") || "live", shown = IDLE, at = Number(page.query.get("step") || 1) - 1, playing = false, begun = 0, part = 0.5, speed = 1, raf = 0;
  const picture = h("div"), sayBox = h("div", { class: "now" }), list = h("ol", { class: "fsteps", tabindex: -1, "aria-label": "Steps" });
  const range = h("input", { type: "range", min: 1, "aria-label": "Step", oninput: () => go(Number(range.value) - 1) });
  const playButton = h("button", { class: "btn", type: "button", style: { width: "84px", "justify-content": "center" }, onclick: () => play(!playing) });
  const where = h("span", { class: "dim num", style: { "min-width": "64px" } });
  const arrow = (d) => s("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" }, s("path", { d, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }));
  const steppers = [["Step back", -1, "M8 2L4 6L8 10"], ["Step forward", 1, "M4 2L8 6L4 10"]].map(([t, by, d]) => h("button", { class: "btn icon", type: "button", "aria-label": t, onclick: () => go(at + by) }, arrow(d)));
  const f = () => shown;
  let moving = null, geo = null;

  // The state after step `at` is a fold over the steps before it, so jumping is as cheap as playing.
  function stateAt(n) {
    const objs = { ...(f().cls ? { sc: ["ok", "exists"] } : {}), ...(f().begin || {}) }, miles = new Set(f().had || []), seen = new Set();
    f().steps.slice(0, n + 1).forEach((x) => { Object.assign(objs, x.set || {}); if (x.reach) miles.add(x.reach); seen.add(x.who + x.side); });
    return { objs, miles, seen };
  }
  function draw() {
    const w = picture.clientWidth || 800, wide = w >= 640, pitch = wide ? 54 : 50, top = wide ? 44 : 40, high = top + pitch * 8;
    const api = wide ? 204 : 84, cmp = wide ? 132 : 100, drv = wide ? 168 : 96, gap = (w - api - cmp - drv) / 2;
    const x1 = api + gap, x2 = x1 + cmp, x3 = x2 + gap, mid = (i) => top + pitch * i + pitch / 2;
    const idle = !f().steps.length, cur = idle ? { side: "", who: "" } : f().steps[Math.min(at, f().steps.length - 1)], { objs, miles, seen } = stateAt(at), bad = cur.bad;
    const cut = (text) => (text && text.length > 22 ? `${text.slice(0, 20)}…` : text), names = { sc: cut(f().cls), pvc: cut(f().claim), pod: cut(f().pod), pv: cut(f().pv), va: f().node ? cut(`to ${f().node}`) : "" };
    const label = (m) => { const [lane, off] = REACHED_AT[m], on = miles.has(m), y = mid(lane) + off * 12; return s("g", null, s("g", { transform: `translate(${x3 + (wide ? 12 : 5)},${y - 5})`, class: on ? "g-ok" : "g-wait" }, s("path", { d: SHAPES[on ? "ok" : "wait"], "fill-rule": "evenodd" })), s("text", { x: x3 + (wide ? 28 : 17), y: y + 4, class: `mono ${on ? "b" : "s"}`, style: { "font-size": "11px" } }, m)); };
    const svg = s("svg", { viewBox: `0 0 ${w} ${high}`, height: high, role: "img", "aria-label": idle ? "Nothing moves now" : `Step ${at + 1} of ${f().steps.length}: ${cur.say}` },
      s("rect", { class: "bus", x: 0.5, y: 0.5, width: api - 1, height: high - 1, rx: 4 }), s("text", { x: 12, y: 24, class: "b" }, "API server"),
      s("rect", { class: "bus", x: x3 + 0.5, y: 0.5, width: drv - 1, height: high - 1, rx: 4 }), s("text", { x: x3 + (wide ? 12 : 6), y: 24, class: "b" }, "driver"), wide ? s("text", { x: x3 + 12, y: 40, class: "s" }, f().driver) : null,
      wide ? [s("text", { x: api + gap / 2, y: 24, class: "s", "text-anchor": "middle" }, "objects: watch, write"), s("text", { x: x2 + gap / 2, y: 24, class: "s", "text-anchor": "middle" }, "CSI calls")] : null,
      LANES.map(([who, name, tone], i) => {
        const y = mid(i), on = cur.who === who, csi = ["provisioner", "attacher", "resizer", "node"].includes(who);
        const cls = (side) => `edge${seen.has(who + side) ? " seen" : ""}${on && cur.side === side ? (bad ? " err" : " on") : ""}`;
        return [s("line", { class: cls("api"), x1: api, x2: x1, y1: y, y2: y }), csi ? s("line", { class: cls("csi"), x1: x2, x2: x3, y1: y, y2: y }) : null,
          s("rect", { class: `cmp${on ? (bad ? " err" : " on") : ""}`, x: x1, y: y - 18, width: cmp, height: 36, rx: 3 }), s("rect", { x: x1 + 1, y: y - 17, width: 4, height: 34, style: { fill: color(tone) } }),
          s("text", { x: x1 + (wide ? 14 : 10), y: who === "node" && wide ? y - 1 : y + 4, class: on ? "b" : "" }, who === "node" && wide ? f().node ? cut(`node ${f().node}`).slice(0, 17) : "node" : name), who === "node" && wide ? s("text", { x: x1 + 14, y: y + 12, class: "s" }, "volume manager") : null];
      }),
      OBJECTS.map(([k, kind, short], i) => {
        const y = top + i * (wide ? 74 : 66), st = objs[k], hit = cur.set && k in cur.set;
        return s("g", { class: st ? "" : "none" }, s("rect", { class: `obj${hit ? " hit" : ""}`, x: wide ? 12 : 6, y, width: api - (wide ? 24 : 12), height: wide ? 60 : 52, rx: 3 }),
          s("text", { x: wide ? 22 : 12, y: y + 17, class: "s" }, wide ? kind : short),
          wide ? s("text", { x: 22, y: y + 33, class: "b" }, st ? names[k] : "not there") : null,
          st ? [s("g", { transform: `translate(${wide ? 22 : 12},${y + (wide ? 41 : 28)})`, class: `g-${st[0]}` }, s("path", { d: SHAPES[st[0]], "fill-rule": "evenodd" })), s("text", { x: wide ? 38 : 26, y: y + (wide ? 50 : 37), style: { "font-size": wide ? "12px" : "11px" } }, st[1])] : null);
      }),
      MILESTONES.map(label));
    if (idle) { moving = null; picture.replaceChildren(svg); return; }
    const y = mid(LANES.findIndex((l) => l[0] === cur.who));
    const [a, b] = cur.side === "api" ? [api, x1] : [x2, x3];
    const [from, to] = cur.dir === "out" ? [a, b] : [b, a];
    let len = 10;
    const tok = s("g", { class: `tok ${cur.side === "api" ? "obj-t" : ""} ${bad ? "err" : ""}` }, s("rect", wide ? { y: -10, height: 20, rx: 3 } : { y: -6, height: 12, rx: 2 }), wide ? s("text", { y: 4 }, cur.tok) : null);
    const dir = to > from ? 1 : -1;
    svg.append(s("path", { d: `M${to - dir * 7} ${y - 5}L${to} ${y}L${to - dir * 7} ${y + 5}`, style: { fill: "none", stroke: bad ? "var(--bad)" : "var(--accent)", "stroke-width": "2" } }), tok);
    picture.replaceChildren(svg);
    if (wide) len = Math.ceil($("text", tok).getComputedTextLength()) + 16;
    const box = $("rect", tok), inset = Math.min(len / 2 + 2, gap / 2);
    box.setAttribute("x", -len / 2); box.setAttribute("width", len);
    moving = tok; geo = { from: from + dir * inset, to: to - dir * inset, y };
    place();
  }
  function place() { if (!moving) return; moving.setAttribute("transform", `translate(${geo.from + (geo.to - geo.from) * part},${geo.y})`); }
  function text() {
    at = Math.max(0, Math.min(at, f().steps.length - 1));
    const cur = f().steps[at];
    for (const b of [range, playButton, ...steppers]) b.disabled = !cur;
    if (!cur) { sayBox.replaceChildren(h("div", null, h("p", { class: "say" }, "Nothing moves now. Make a claim with a pod, and watch it here."), h("div", { style: { "margin-top": "8px" } }, section("classes", []).some((c) => c.name === "berth-local") ? command("kubectl apply -f examples/local.yaml") : null))); where.textContent = ""; range.max = 1; playButton.textContent = "Play"; return; }
    const ms = (t) => (f().total < 1000 ? `${fix(t, 1)}${NB}ms` : took(t));
    sayBox.setAttribute("aria-live", playing ? "off" : "polite");
    sayBox.replaceChildren(h("div", null, h("p", { class: "say" }, cur.say), h("p", { class: "dim3" }, `${LANES.find((l) => l[0] === cur.who)[1]}, after ${ms(cur.t)}`, cur.d ? `, took ${ms(cur.d)}` : "", cur.reach ? `. Reached ${cur.reach}.` : "")),
      h("pre", { class: "mono" }, (cur.diff || [cur.side === "csi" ? (cur.dir === "out" ? `${cur.what.replace(/^calls /, "")}` : cur.tok) : "No object changes."]).map((l) => h("span", { class: l[0] === "+" ? "add" : l[0] === "-" ? "del" : "" }, l, "\n"))));
    range.max = f().steps.length; range.value = at + 1;
    where.textContent = `${at + 1} of ${f().steps.length}`;
    playButton.textContent = playing ? "Pause" : "Play"; playButton.setAttribute("aria-pressed", playing);
    [...list.children].forEach((li, i) => { li.className = i <= at ? "past" : ""; const b = li.firstChild; if (i === at) b.setAttribute("aria-current", "step"); else b.removeAttribute("aria-current"); });
    const on = list.children[at];
    if (on && list.scrollHeight > list.clientHeight) list.scrollTop = on.offsetTop - list.offsetTop - list.clientHeight / 2;
  }
  function fill() {
    const ms = (t) => (f().total < 1000 ? `${fix(t, 1)}${NB}ms` : took(t));
    list.replaceChildren(...f().steps.map((x, i) => h("li", null, h("button", { type: "button", onclick: () => go(i) }, h("span", { class: "num dim3" }, ms(x.t)), h("span", { class: "c cut" }, LANES.find((l) => l[0] === x.who)[1]), h("span", { class: x.bad ? "err" : "" }, x.what)))));
  }
  function go(n) { if (!shown.steps.length) { text(); draw(); return; } if (playing) play(false); at = Math.max(0, Math.min(f().steps.length - 1, n)); part = 0.5; text(); draw(); }
  // A token comes, rests in the middle so that it can be read, and goes on.
  const MOVE = 380, REST = 640;
  const ease = (t) => t * t * (3 - 2 * t);
  function run(now) {
    if (!playing) return;
    const t = (now - begun) * speed;
    if (t >= MOVE * 2 + REST) {
      if (at + 1 >= f().steps.length) { play(false); return; }
      at += 1; begun = now; part = still() ? 0.5 : 0; text(); draw();
    } else if (!still()) {
      part = t < MOVE ? ease(t / MOVE) * 0.5 : t < MOVE + REST ? 0.5 : 0.5 + ease((t - MOVE - REST) / MOVE) * 0.5;
      place();
    }
    raf = requestAnimationFrame(run);
  }
  function play(on, on_from_here) {
    playing = on && shown.steps.length > 0;
    cancelAnimationFrame(raf);
    if (playing) { if (at + 1 >= f().steps.length && !on_from_here) at = 0; begun = performance.now(); part = still() ? 0.5 : 0; draw(); raf = requestAnimationFrame(run); }
    text();
  }
  // Live follows the claim that something happened to last; a chosen one is shown as far as it is known.
  const chosen = () => (key === "live" ? section("flows", [])[0]?.id : key);
  let asking = false, again = false;
  async function fetchIt(follow) {
    const id = chosen();
    if (!id) { shown = IDLE; fill(); text(); draw(); return; }
    if (asking) { again = true; return; }
    asking = true;
    try {
      const found = await ask(`/api/flow?id=${encodeURIComponent(id)}`), other = found.id !== shown.id, had = shown.steps.length;
      shown = found;
      fill();
      if (other) { at = page.query.has("step") ? Math.min(Number(page.query.get("step")), found.steps.length) - 1 : 0; text(); draw(); if (follow && !still()) play(true); }
      else if (found.steps.length > had) { text(); draw(); if (follow && !playing && at === had - 1 && !still()) play(true, true); }
    } catch { /* asked again with the next change */ }
    asking = false;
    if (again) { again = false; fetchIt(follow); }
  }
  function choices() {
    const list = section("flows", []);
    pickFlow.replaceChildren(h("option", { value: "live", selected: key === "live" }, "Live: the last claim that changed"), ...list.map((x) => h("option", { value: x.id, selected: key === x.id }, `${x.id}${x.state === "bad" ? ", stuck" : ""}`)),
      ...(key !== "live" && !list.some((x) => x.id === key) ? [h("option", { value: key, selected: true }, key)] : []));
  }
  const pickFlow = h("select", { "aria-label": "Recording", onchange: () => { key = pickFlow.value; shown = IDLE; at = 0; history.replaceState(null, "", `#/flow${key === "live" ? "" : `?of=${encodeURIComponent(key)}`}`); fetchIt(true); } });
  choices();
  const seen = new ResizeObserver(() => frame.ask(draw));
  page.stop.push(() => { seen.disconnect(); play(false); });
  const keyed = (e) => {
    if (/INPUT|SELECT|BUTTON/.test(e.target.tagName) && e.key === " ") return;
    if (e.target.tagName === "SELECT" || e.target.tagName === "INPUT") return;
    if (e.key === " ") { e.preventDefault(); play(!playing); }
    if (e.key === "ArrowRight") go(at + 1); if (e.key === "ArrowLeft") go(at - 1);
  };
  addEventListener("keydown", keyed); page.stop.push(() => removeEventListener("keydown", keyed));
  return { title: "Flow", after: () => { seen.observe(picture); fetchIt(!page.query.has("step")); }, update: (ids, names) => { if (names.has("flows")) choices(); if (!ids || ids.has(chosen()) || names.has("flows")) fetchIt(true); }, node: [
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, "Flow"), h("span", { class: "meta" }, "Who tells whom what, from kubectl apply to a running pod. Slowed down to be read.")),
    h("div", { class: "player" }, pickFlow, h("span", { class: "grp" }, steppers[0], playButton, steppers[1]), range, where,
      h("select", { "aria-label": "Speed", onchange: (e) => { speed = Number(e.target.value); } }, [["0.5", "Half speed"], ["1", "Normal speed"], ["2", "Double speed"]].map(([v, t]) => h("option", { value: v, selected: v === "1" }, t)))),
    h("div", { class: "flow" }, h("div", null, picture, sayBox), h("div", null, h("div", { class: "sec" }, h("h2", null, "Steps"), h("span", { class: "meta" }, "choose one to go there")), list))] };
}

/* ---------------------------------------------------------------- nodes and drivers */
const shortName = (driver) => driver.split(".")[0];
function nodes() {
  const holder = h("div"), out = h("div", { role: "status" });
  const classes = section("classes", []).filter((c) => c.exists);
  const asked = { cls: page.query.get("cls") || classes.find((c) => c.isDefault)?.name || classes[0]?.name || "", gib: Number(page.query.get("size") || 20) };
  const cell = (label, ...kids) => h("div", { role: "cell", "data-l": label }, h("div", null, ...kids));
  const number = (label, ...kids) => h("div", { role: "cell", class: "num", "data-l": label }, h("div", null, ...kids));
  let turn = 0;
  async function answer() {
    const mine = ++turn;
    if (!asked.cls) { out.replaceChildren(h("p", { class: "dim" }, "There is no class: a claim gets a volume only if one is made by hand.")); return; }
    let a;
    try { a = await ask(`/api/landing?class=${encodeURIComponent(asked.cls)}&size=${asked.gib}`); } catch { return; }
    if (mine !== turn) return;
    out.replaceChildren(h("p", { class: "answer" }, h("span", { class: `st ${a.good ? "ok" : "bad"}` }, glyph(a.good ? "ok" : "bad")), h("span", null, a.answer)),
      h("div", { class: "tbl plain stack land", role: "table", "aria-label": "Nodes, checked one by one" },
        h("div", { class: "tr th", role: "row" }, ["Node", "Result", "Ready", "Driver", "Attached", "Capacity", "Why not"].map((x) => h("span", { role: "columnheader" }, x))),
        a.rows.map((r) => h("div", { class: `tr${r.best ? " best" : ""}`, role: "row" }, h("b", { role: "cell", class: "cut", title: r.node }, r.node),
          cell("Result", r.why ? chip("bad", "No") : r.best ? chip("ok", "Here") : chip("ok", a.hasBest ? "Fits, less room" : "Can use it")),
          cell("Ready", tick(r.ready, r.ready ? "Ready" : "Not ready")), cell("Driver", r.registered === null ? chip("off", "Unknown") : tick(r.registered, r.registered ? "Registered" : "Not registered")), cell("Attached", tick(r.limit === null || r.taken < r.limit, r.limit === null ? "No limit" : `${r.taken} of ${r.limit}`)),
          cell("Capacity", r.fits === null ? chip("off", a.denied ? "May not be read" : "Not reported") : tick(r.fits, r.room === null ? "Not reported" : `${bytes(r.room)} left`)), h("div", { role: "cell", class: "dim" }, r.why)))));
  }
  const body = h("div");
  function draw() {
    const list = section("nodes", []), drivers = section("drivers", []), pools = section("capacities", null), seen = drivers.filter((d) => d.on || d.volumes);
    body.replaceChildren(
      h("div", { class: "two" },
        h("section", { "aria-labelledby": "h-mx" }, h("div", { class: "sec" }, h("h2", { id: "h-mx" }, "Nodes"), h("span", { class: "meta" }, "volumes of each driver, of the limit where there is one")),
          h("div", { class: "tbl plain stack mx", role: "table", "aria-label": "Volumes of drivers on nodes", style: { "--cols": `minmax(112px, 1fr) repeat(${Math.max(1, seen.length)}, minmax(84px, 1fr))` } }, h("div", { class: "tr th", role: "row" }, h("span", { role: "columnheader" }, "Node"), seen.map((d) => h("span", { role: "columnheader", class: "cut", title: d.name }, shortName(d.name)))),
            list.slice(0, 100).map((n) => h("div", { class: "tr", role: "row" }, h("div", { role: "cell" }, chip(n.ready ? "ok" : "bad", n.name), h("div", { class: "dim3" }, [n.zone, n.kubelet, n.ready ? null : "not ready"].filter(Boolean).join(", "))),
              seen.map((d) => { const x = n.drivers[d.name], k = x?.count || 0, full = x?.limit !== null && x?.limit !== undefined && k >= x.limit; return cell(shortName(d.name), x?.on ? (full ? chip("warn", `${k} of ${x.limit}, full`) : chip("ok", x.limit === null ? k : `${k} of ${x.limit}`)) : chip(k ? "bad" : "off", "Not registered"), !x?.on && k ? h("div", { class: "dim" }, `${k} volumes stay mounted`) : null); })))),
          list.length > 100 ? h("p", { class: "dim" }, `${list.length - 100} more nodes are not shown.`) : null),
        h("section", { "aria-labelledby": "h-drv" }, h("div", { class: "sec" }, h("h2", { id: "h-drv" }, "Drivers"), h("span", { class: "meta" }, "calls in the last hour, of the last 512")),
          h("div", { class: "tbl plain stack drv", role: "table", "aria-label": "Drivers" }, h("div", { class: "tr th", role: "row" }, ["Name, what it can do", "Nodes", "Calls", "Failed", "p95"].map((x, i) => h("span", { role: "columnheader", class: i > 1 ? "num" : "" }, x))),
            drivers.map((d) => h("div", { class: "tr", role: "row" }, h("div", { role: "cell" }, h("b", null, d.name), " ", h("span", { class: "dim3" }, d.declared ? "" : "no CSIDriver object"), h("div", { class: "dim" }, d.can || "nothing declared")), cell("Nodes", chip(d.on && d.on >= d.all ? "ok" : "warn", `${d.on} of ${d.all}`)), number("Calls", d.calls?.count ?? "–"), number("Failed", d.calls?.failed ? chip("warn", d.calls.failed) : d.calls ? "0" : "–"), number("p95", d.calls?.p95 ? took(d.calls.p95) : "–")))))),
      h("section", { "aria-labelledby": "h-cap" }, h("div", { class: "sec" }, h("h2", { id: "h-cap" }, "Capacity per class and place"), h("span", { class: "meta" }, pools ? "as the drivers reported it" : "")),
        !pools ? h("div", { class: "verdict warn", role: "note" }, glyph("warn"), h("p", null, h("b", null, "You may not list csistoragecapacities in storage.k8s.io.")), h("p", { class: "todo" }, "Capacity is missing here, and “Where would this claim land?” cannot check room. Ask for the rights that this page needs."), command("kubectl apply -f deploy/ui/rbac.yaml"))
        : pools.length ? h("div", { class: "tbl plain stack capt", role: "table", "aria-label": "Capacity" }, h("div", { class: "tr th", role: "row" }, ["Class", "Place", "Free", "Taken", "Largest volume", ""].map((x, i) => h("span", { role: "columnheader", class: i === 2 || i > 3 ? "num" : "" }, x))),
          pools.map((p) => h("div", { class: "tr", role: "row" }, h("span", { role: "cell" }, p.cls), cell("Place", p.place), number("Free", bytes(p.free)), cell("Taken", p.free === null ? "–" : usage(p.taken, p.taken + p.free || 1, "Taken")), h("div", { role: "cell", class: "num opt", "data-l": "Largest" }, h("div", null, bytes(p.max))), h("span", { role: "cell" }))))
        : h("p", { class: "dim" }, "No driver reports capacity.")));
  }
  draw();
  answer();
  holder.append(h("div", { class: "title" }, h("h1", { tabindex: -1 }, "Nodes and drivers"), h("span", { class: "meta" }, `${counted(section("nodes", []).length, "node")}, ${counted(section("drivers", []).length, "driver")}`)),
    h("section", { "aria-labelledby": "h-land" }, h("div", { class: "sec" }, h("h2", { id: "h-land" }, "Where would this claim land?")),
      h("form", { class: "ask", onsubmit: (e) => e.preventDefault() },
        h("label", null, "Class", h("select", { id: "land-class", onchange: (e) => { asked.cls = e.target.value; answer(); } }, classes.map((c) => h("option", { value: c.name, selected: c.name === asked.cls }, c.name)))),
        h("label", null, "Size in GiB", h("input", { class: "field", id: "land-size", type: "number", min: 1, max: 65536, value: asked.gib, oninput: (e) => { asked.gib = Math.max(1, Math.min(65536, Math.round(Number(e.target.value)) || 1)); answer(); } }))), out), body);
  return { title: "Nodes and drivers", node: holder, update: (ids, names) => { if (["nodes", "drivers", "capacities", "classes"].some((n) => names.has(n))) { draw(); answer(); } } };
}

/* ---------------------------------------------------------------- leaks */
function leaks() {
  const holder = h("div");
  function draw() {
    const groups = section("leaks", []), held = sum(groups, (g) => sum(g.rows, (r) => r.size || 0)), n = groups.length ? groups[0].rows.length + groups[1].rows.length : 0, unused = groups[2]?.rows.length || 0;
    const title = n || unused ? `${counted(n, "leak")} and ${counted(unused, "unused claim")} hold ${bytes(held)}` : "No leaks, and no claim that nobody uses";
    holder.replaceChildren(
      h("div", { class: "title" }, h("h1", { tabindex: -1 }, title), h("span", { class: "meta" }, "Compared: what the API server has, and what pods use. Drivers are not asked what else they hold: berth adopt does that.")),
      ...groups.map((g) => h("section", null, h("div", { class: "sec" }, h("h2", null, g.title), h("span", { class: "meta" }, `${g.rows.length} ${g.noun}, ${bytes(sum(g.rows, (r) => r.size || 0))}. ${g.say}`)),
        g.rows.length ? h("div", { class: "tbl plain stack lk-t", role: "table", "aria-label": g.title }, h("div", { class: "tr th", role: "row" }, ["What", "Size", "For", "Why we think so", "What helps"].map((x, i) => h("span", { role: "columnheader", class: i === 1 || i === 2 ? "num" : "" }, x))),
          g.rows.slice(0, 200).map((r) => h("div", { class: "tr", role: "row" }, h("div", { role: "cell" }, h("div", { class: "cut", title: r.name }, r.id ? h("a", { href: linkTo(r.id) }, r.name) : h("b", null, r.name)), h("div", { class: "dim3" }, r.where)), h("div", { role: "cell", class: "num", "data-l": "Size" }, h("span", null, bytes(r.size))), h("div", { role: "cell", class: "num", "data-l": "For" }, h("span", null, r.since ? age(since(r.since)) : "–")), h("div", { role: "cell", class: "dim" }, r.why), h("div", { role: "cell" }, command(r.cmd))))) : h("p", { class: "dim" }, "None."))));
  }
  draw();
  return { title: "Leaks", node: holder, update: (ids, names) => { if (names.has("leaks")) draw(); } };
}

/* ---------------------------------------------------------------- states of the whole page */
function loading(title) {
  const kinds = store.loading || [], done = kinds.filter((k) => k[1]).length;
  return { title, node: [h("div", { class: "title" }, h("h1", { tabindex: -1 }, title), h("span", { class: "meta", role: "status" }, kinds.length ? `Reading the cluster: ${done} of ${kinds.length} kinds, ${sum(kinds, (k) => k[2])} objects.` : "Reading the cluster.")),
    h("div", { "aria-hidden": "true" }, Array.from({ length: 14 }, (_, i) => h("div", { class: "ghost" }, [60 + ((i * 37) % 40), 70 + ((i * 53) % 30), 50 + ((i * 29) % 50), 80, 40 + ((i * 41) % 60)].map((w) => h("span", { style: { width: `${w}%` } })))))] };
}
function empty(title) {
  const classes = section("classes", []).filter((c) => c.exists);
  return { title, update: () => { if (store.rows.size) route(); }, node: [h("div", { class: "title" }, h("h1", { tabindex: -1 }, title)), h("div", { class: "blank" }, h("h2", null, "No volumes yet"), h("p", null, `The cluster has ${classes.length} class${classes.length === 1 ? "" : "es"} and no claim.${classes.some((c) => c.name === "berth-local") ? " Try:" : ""}`), classes.some((c) => c.name === "berth-local") ? command("kubectl apply -f examples/local.yaml") : null, h("p", { style: { margin: "12px 0 0" } }, "The claim appears here, and on ", h("a", { href: "#/flow" }, "Flow"), ", as soon as it exists."))] };
}
function denied(title) {
  const no = section("unreadable", []), why = no.find((x) => x.kind === "PersistentVolumeClaim");
  return { title, node: [h("div", { class: "title" }, h("h1", { tabindex: -1 }, title)), h("div", { class: "blank" }, h("h2", null, "You may not list claims"), h("p", null, `The API server refused: ${why.why} Without claims this page has nothing to show. Somebody with the right to grant rights can run:`), command("kubectl apply -f deploy/ui/rbac.yaml"),
    h("div", { class: "kinds", role: "table", "aria-label": "What this page may not read" }, no.map((x) => [h("span", null, x.kind), chip("bad", "Denied"), h("span")])))] };
}
function token() {
  return { title: "Token needed", node: h("div", { class: "blank" }, h("h1", { tabindex: -1, style: { "margin-bottom": "8px" } }, "This page needs a token"), h("p", null, "Open the link that berth printed when it started. It has the token; the browser then keeps it in a cookie. To see the link of berth up again:"), command("berth status")) };
}

/* ---------------------------------------------------------------- frame and routes */
const ROUTES = { overview, volumes, volume, pv: volume, flow, nodes, leaks };
const NAV = [["overview", "Overview"], ["volumes", "Volumes"], ["flow", "Flow"], ["nodes", "Nodes"], ["leaks", "Leaks"]];
const TITLES = { overview: "Overview", volumes: "Volumes", volume: "Volume", pv: "Volume", flow: "Flow", nodes: "Nodes and drivers", leaks: "Leaks" };
const path = () => location.hash.replace(/^#\/?/, "").split("?")[0].split("/").filter(Boolean);

// What stands above every view: the cluster's name, counts, and whether what is shown is current.
let counting = 0;
function chrome() {
  const about = section("about", {}), lost = section("lost", null), since = store.lost || lost?.since || 0, count = section("attention", []).length, leak = section("leaks", []), leaked = leak.length ? leak[0].rows.length + leak[1].rows.length : 0;
  $("#where").textContent = about.name || "";
  const set = (el, n, label, bad) => { el.hidden = !n; el.textContent = n; el.setAttribute("aria-label", label); el.className = `n${bad ? " bad" : ""}`; };
  set($("#n-overview"), count, `${count} things need attention`, section("attention", []).some((a) => a.state === "bad"));
  set($("#n-leaks"), leaked, `${leaked} leaks`);
  $("#live").replaceChildren(about.recorded ? chip("off", "Recording") : since ? chip("warn", "Stale") : store.ready ? chip("ok", "Live") : chip("busy", "Reading"));
  $("#live").title = about.recorded ? "What berth up --record kept" : `Watches; revision ${store.version} of this page`;
  const el = $("#banner");
  clearInterval(counting);
  el.hidden = !since || !store.ready || store.denied;
  if (el.hidden) { el.replaceChildren(); return; }
  const text = h("span", { class: "dim" });
  const tickDown = () => { text.textContent = store.lost ? `What you see is from ${clock(store.seen + store.skew)}. Next try in ${Math.max(0, Math.ceil((next - Date.now()) / 1000))} s.` : `What you see is from before ${clock(since)}: ${lost.why}`; };
  tickDown();
  counting = setInterval(tickDown, 1000);
  el.replaceChildren(h("div", { class: "banner", role: "alert" }, chip("warn", store.lost ? "The connection to berth is lost." : "The connection to the API server is lost."), text, store.lost ? h("button", { class: "btn", type: "button", onclick: () => { text.textContent = "Trying…"; connect(); } }, "Try now") : null));
}
let first = true, shownPath = "";
function route() {
  for (const f of page.stop) f();
  page.stop = [];
  tip.hide();
  const [name = "overview", ...rest] = path();
  page.query = new URLSearchParams(location.hash.split("?")[1] || "");
  if (page.query.has("theme")) setTheme(page.query.get("theme"));
  const known = Object.hasOwn(ROUTES, name) ? name : "overview", id = (known === "pv" ? "/" : "") + rest.map(decodeURIComponent).join("/");
  const noClaims = section("unreadable", []).some((x) => x.kind === "PersistentVolumeClaim");
  const view = store.denied ? token() : !store.ready ? loading(TITLES[known]) : noClaims && ["overview", "volumes", "volume"].includes(known) ? denied(TITLES[known])
    : !store.rows.size && known === "volumes" ? empty(TITLES[known]) : known === "volume" || known === "pv" ? volume(id) : ROUTES[known]();
  document.title = `${view.title}, Berth`;
  page.update = view.update || null;
  $("main").replaceChildren(...[view.node].flat(9).filter(Boolean));
  view.after?.();
  for (const a of document.querySelectorAll("nav.main a")) { const on = a.dataset.v === (known === "volume" || known === "pv" ? "volumes" : known); if (on) a.setAttribute("aria-current", "page"); else a.removeAttribute("aria-current"); }
  const here = path().join("/");
  if (!first && here !== shownPath) { scrollTo(0, 0); $("h1")?.focus({ preventScroll: true }); }
  shownPath = here;
  if (store.ready) first = false;
}
function setTheme(t) {
  if (t === "auto") document.documentElement.removeAttribute("data-theme"); else document.documentElement.dataset.theme = t;
  $("#theme").setAttribute("aria-label", `Theme: ${t}. Change`); $("#theme").title = `Theme: ${t}`;
  page.theme = t;
  try { localStorage.setItem("theme", t); } catch { /* not kept, then */ }
}
function help() {
  const box = h("dialog", { "aria-labelledby": "dlg", onclose: () => box.remove() }, h("h2", { id: "dlg" }, "Keys"), h("div", { class: "keys" }, [["/", "Find a volume"], ["g then o, v, f, n, l", "Overview, Volumes, Flow, Nodes, Leaks"], ["↑ ↓ or j k", "Move in the table"], ["Enter", "Open the volume"], ["Space, ← →", "Flow: play or pause, step"], ["t", "Change the theme"], ["?", "This list"]].map(([k, t]) => [h("span", null, h("kbd", null, k)), h("span", null, t)])), h("div", { class: "row" }, h("button", { class: "btn", type: "button", onclick: () => box.close() }, "Close")));
  document.body.append(box); box.showModal();
}
function find() { if (path()[0] === "volumes") { $("#filter")?.focus(); return; } location.hash = "#/volumes"; setTimeout(() => $("#filter")?.focus(), 30); }
const cycle = () => setTheme({ auto: "light", light: "dark", dark: "auto" }[page.theme]);

document.body.prepend(
  h("a", { class: "skip", href: "#main", onclick: (e) => { e.preventDefault(); $("h1")?.focus(); } }, "Skip to content"),
  h("header", { class: "app" },
    h("a", { class: "brand", href: "#/overview", "aria-label": "Berth, overview" }, s("svg", { width: 18, height: 18, viewBox: "0 0 18 18", "aria-hidden": "true" }, s("path", { d: "M2 3v12h14V3", fill: "none", stroke: "currentColor", "stroke-width": 2 }), s("rect", { x: 6, y: 5, width: 6, height: 7, fill: "currentColor" })), "Berth"),
    h("span", { class: "where", title: "The cluster" }, h("span", { class: "cut", id: "where" })),
    h("nav", { class: "main", "aria-label": "Views" }, NAV.map(([k, t]) => h("a", { href: `#/${k}`, "data-v": k }, k === "nodes" ? h("span", null, "Nodes", h("span", { class: "more" }, " and drivers")) : t, k === "overview" || k === "leaks" ? h("span", { class: "n", id: `n-${k}`, hidden: true }) : null))),
    h("div", { class: "end" }, h("button", { class: "btn find", type: "button", onclick: find, "aria-label": "Find a volume, key /" }, h("span", null, "Find a volume"), h("kbd", null, "/")), h("span", { class: "live", id: "live" }),
      h("button", { class: "btn quiet icon", id: "theme", type: "button", onclick: cycle }, s("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" }, s("circle", { cx: 8, cy: 8, r: 6, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }), s("path", { d: "M8 2a6 6 0 0 1 0 12Z", fill: "currentColor" }))))),
  h("div", { id: "banner", hidden: true }));
document.body.append(h("div", { id: "tip", role: "tooltip", hidden: true }), h("div", { id: "say", class: "sr", "aria-live": "polite" }));
let kept = "auto";
try { kept = localStorage.getItem("theme") || "auto"; } catch { /* follows the system */ }
setTheme(["auto", "light", "dark"].includes(kept) ? kept : "auto");
let g = 0;
addEventListener("keydown", (e) => {
  if (e.key === "Escape") tip.hide();
  if (e.ctrlKey || e.metaKey || e.altKey || /INPUT|SELECT|TEXTAREA/.test(e.target.tagName) || $("dialog")) return;
  const to = { o: "overview", v: "volumes", f: "flow", n: "nodes", l: "leaks" }[e.key];
  if (to && Date.now() - g < 1000) { location.hash = `#/${to}`; g = 0; return; }
  if (e.key === "g") g = Date.now();
  if (e.key === "/") { e.preventDefault(); find(); }
  if (e.key === "?") help();
  if (e.key === "t") cycle();
});
addEventListener("hashchange", route);
chrome();
route();
connect();
