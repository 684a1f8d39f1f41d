// What the page does beyond its HTML: live parts, keys, charts under the pointer, the theme.
// Nothing here makes HTML of text: live parts are HTML of the server, everything else is textContent.
"use strict";

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
document.documentElement.classList.add("has-script");

// --- theme -----------------------------------------------------------------------------------
const root = document.documentElement;
function kept(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(name);
    localStorage.setItem(name, value);
  } catch { /* a browser that keeps nothing */ }
  return value ?? null;
}
const theme = kept("theme");
if (theme === "light" || theme === "dark") root.dataset.theme = theme;
const themeButton = document.getElementById("theme");
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = kept("theme", dark ? "light" : "dark");
});

// --- live parts ------------------------------------------------------------------------------
const liveState = document.getElementById("live-state");
function replaced(name, html) {
  const element = document.getElementById(name);
  if (!element) return;
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  if (focused && /^(INPUT|SELECT|TEXTAREA)$/.test(focused.tagName) && focused.type !== "checkbox") return;
  const chosen = all("input:checked", element).map((one) => one.id);
  const at = all("[data-row]", element).findIndex((one) => one.classList.contains("at"));
  const scrolled = all(".scroll", element).map((one) => one.scrollLeft);
  element.innerHTML = html;
  chosen.forEach((id) => { const box = id && document.getElementById(id); if (box) box.checked = true; });
  all(".scroll", element).forEach((one, n) => { one.scrollLeft = scrolled[n] || 0; });
  if (at >= 0) mark(all("[data-row]", element)[at], false);
  if (focused) {
    const again = focused.id ? document.getElementById(focused.id) : all(focused.tagName + (focused.className ? "." + focused.classList[0] : ""), element)[0];
    if (again) again.focus({ preventScroll: true });
  }
}
const live = document.querySelector("[data-live]");
if (live && live.dataset.live && "EventSource" in window) {
  const source = new EventSource(live.dataset.live);
  const say = (on) => {
    liveState.className = "live-state " + (on ? "on" : "off");
    liveState.textContent = on ? "live" : "connection lost, trying again";
  };
  source.addEventListener("open", () => say(true));
  source.addEventListener("error", () => say(false));
  source.addEventListener("message", (event) => {
    const end = event.data.indexOf("\n");
    replaced(event.data.slice(0, end), event.data.slice(end + 1));
  });
  window.addEventListener("pagehide", () => source.close());
}

// --- forms that need no button ---------------------------------------------------------------
document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-auto]");
  if (form) form.requestSubmit();
});

// --- keys ------------------------------------------------------------------------------------
const help = document.getElementById("help");
const keysButton = document.getElementById("keys");
keysButton.hidden = false;
keysButton.addEventListener("click", () => help.showModal());

function mark(row, focus = true) {
  all("[data-row].at").forEach((one) => one.classList.remove("at"));
  if (!row) return;
  row.classList.add("at");
  if (!focus) return;
  const link = row.querySelector("[data-open], input") || row;
  link.focus({ preventScroll: true });
  row.scrollIntoView({ block: "nearest" });
}
function moved(by) {
  const rows = all("[data-row]");
  if (!rows.length) return;
  const at = rows.findIndex((one) => one.classList.contains("at"));
  mark(rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by))]);
}
function followed(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
}
const KEYS = {
  j: () => moved(1),
  k: () => moved(-1),
  x: () => {
    const box = document.querySelector("[data-row].at input[type=checkbox]");
    if (box) box.checked = !box.checked;
  },
  c: () => { const form = document.getElementById("choose"); if (form) form.requestSubmit(); },
  "/": () => { const field = document.querySelector("[data-filter]"); if (field) field.focus(); },
  "[": () => followed("a[rel=prev]"),
  "]": () => followed("a[rel=next]"),
  g: () => { location.href = "/"; },
  "?": () => help.showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox") {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const chart = event.target.closest?.(".chart");
  if (chart && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    read(chart, (Number(chart.dataset.at ?? -1)) + (event.key === "ArrowRight" ? 1 : -1));
    event.preventDefault();
    return;
  }
  if (/^[1-9]$/.test(event.key)) return followed(`[data-tab="${event.key}"]`);
  if (KEYS[event.key]) {
    event.preventDefault();
    KEYS[event.key]();
  }
});

// --- charts ----------------------------------------------------------------------------------
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  return String(Number(value.toPrecision(4)));
}
function pointsOf(chart) {
  const curves = JSON.parse(chart.dataset.points);
  const xs = curves.flatMap((one) => one.xs);
  return { curves, low: Math.min(...xs), high: Math.max(...xs) };
}
function nearest(xs, x) {
  let best = 0;
  xs.forEach((one, n) => { if (Math.abs(one - x) < Math.abs(xs[best] - x)) best = n; });
  return best;
}
function shown(chart, x, points) {
  const plot = chart.querySelector(".plot");
  if (!plot) return;
  const share = points.high > points.low ? (x - points.low) / (points.high - points.low) : 0.5;
  let cross = plot.querySelector(".cross");
  if (!cross) {
    cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cross.setAttribute("class", "cross");
    cross.setAttribute("y1", "10");
    cross.setAttribute("y2", "168");
    plot.append(cross);
  }
  const at = `${(100 * share).toFixed(2)}%`;
  cross.setAttribute("x1", at);
  cross.setAttribute("x2", at);
  let tip = chart.querySelector(".tip");
  if (!tip) {
    tip = document.createElement("div");
    tip.className = "tip";
    tip.setAttribute("role", "status");
    chart.append(tip);
  }
  tip.replaceChildren();
  const head = document.createElement("div");
  head.textContent = `${chart.dataset.x} ${short(x)}`;
  tip.append(head);
  for (const one of points.curves) {
    const line = document.createElement("div");
    const swatch = document.createElement("span");
    swatch.className = `swatch k${one.colour}`;
    const text = document.createElement("span");
    text.textContent = `${one.label} ${short(one.ys[nearest(one.xs, x)])}${chart.dataset.unit}`;
    line.append(swatch, text);
    tip.append(line);
  }
  const width = chart.clientWidth;
  const left = plot.getBoundingClientRect().left - chart.getBoundingClientRect().left + share * plot.clientWidth;
  tip.style.left = `${left < width / 2 ? left + 10 : Math.max(4, left - tip.offsetWidth - 10)}px`;
  tip.style.top = "44px";
}
function hidden(chart) {
  chart.querySelector(".tip")?.remove();
  chart.querySelector(".cross")?.remove();
}
function read(chart, at) {
  const points = pointsOf(chart);
  const xs = [...new Set(points.curves.flatMap((one) => one.xs))].sort((a, b) => a - b);
  const place = Math.min(xs.length - 1, Math.max(0, at));
  chart.dataset.at = String(place);
  shown(chart, xs[place], points);
}
document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.(".chart");
  all(".chart").forEach((one) => { if (one !== chart && one !== document.activeElement) hidden(one); });
  const plot = chart?.querySelector(".plot");
  if (!plot) return;
  const box = plot.getBoundingClientRect();
  const points = pointsOf(chart);
  const x = points.low + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (points.high - points.low);
  const first = points.curves[0];
  if (first) shown(chart, first.xs[nearest(first.xs, x)], points);
});
document.addEventListener("focusout", (event) => {
  const chart = event.target.closest?.(".chart");
  if (chart) hidden(chart);
});

// A link to a turn marks it, so that the keys continue from there.
if (location.hash.startsWith("#turn-")) mark(document.getElementById(location.hash.slice(1)), false);
