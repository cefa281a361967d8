// What the status page draws: small plots of the last hour, and the blocks of a pool.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const PLOT = { width: 220, height: 48 };
const CELL = { least: 5, most: 14 };

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// A line over time; null = unknown, a gap. `most`: the top of the plot, or the largest value.
function plot(title, values, show, most) {
  const figure = document.createElement("figure");
  const known = values.filter((value) => value !== null);
  const top = most || Math.max(...known, 1e-9);
  const svg = shape("svg", { viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: "img", preserveAspectRatio: "none" });
  const last = values.length ? values[values.length - 1] : null;
  const now = last === null ? "-" : show(last);
  const span = known.length ? `${show(Math.min(...known))} to ${show(Math.max(...known))}` : "nothing known";
  svg.setAttribute("aria-label", `${title}: now ${now}, in the last hour ${span}`);
  let path = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const x = values.length > 1 ? (at / (values.length - 1)) * PLOT.width : 0;
    const y = PLOT.height - 2 - (Math.min(value, top) / top) * (PLOT.height - 4);
    path += `${at && values[at - 1] !== null ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}h0.01`;
  });
  svg.append(shape("path", { d: path, class: "line" }));
  const caption = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = title;
  const value = document.createElement("strong");
  value.textContent = now;
  const range = document.createElement("small");
  range.textContent = span;
  caption.append(name, value);
  figure.append(caption, svg, range);
  return figure;
}

function drawPlots(element, note, history) {
  const known = (values) => values.map((value) => (value < 0 ? null : value));
  const share = (value) => `${Math.round(100 * value)} %`;
  const number = (value) => (value < 10 ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value).toLocaleString("en"));
  element.replaceChildren(
    plot("Held", known(history.held), share, 1),
    plot("Hit", known(history.hit), share, 1),
    plot("Running", known(history.running), number),
    plot("Waiting", known(history.waiting), number),
    plot("Steps/s", known(history.steps_per_s), number),
  );
  const minutes = Math.round((history.held.length * history.interval_ms) / 60000);
  const every = `one sample each ${history.interval_ms / 1000} s`;
  note.textContent = history.held.length ? `the last ${minutes} min, ${every}` : `no sample yet: ${every}`;
}

// ---- the pool

function words(base64) {
  const raw = atob(base64 || "");
  const bytes = Uint8Array.from(raw, (one) => one.charCodeAt(0));
  return new Uint32Array(bytes.buffer);
}

function hue(group) {
  return (212 + 137.5 * group) % 360;
}

function colors(group) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [held, cached] = dark ? ["75% 62%", "45% 36%"] : ["70% 42%", "60% 76%"];
  return { held: `hsl(${hue(group)} ${held})`, cached: `hsl(${hue(group)} ${cached})` };
}

// The parts of the map: what a block can be, with its color and its count in each cell.
function layersOf(map, nameOf) {
  const layers = map.groups.flatMap((group, at) => [
    { name: `${nameOf(at)}, held`, color: colors(at).held, counts: words(group.held) },
    { name: `${nameOf(at)}, cached`, color: colors(at).cached, counts: words(group.cached) },
  ]);
  const style = getComputedStyle(document.documentElement);
  layers.push({ name: "transfers", color: style.getPropertyValue("--warn"), counts: words(map.other) });
  for (const layer of layers) layer.total = layer.counts.reduce((sum, count) => sum + count, 0);
  return layers;
}

function drawMap(canvas, legend, map, numBlocks, nameOf) {
  const layers = layersOf(map, nameOf);
  const first = (cell) => Math.ceil((cell * numBlocks) / map.cells);
  const width = canvas.parentElement.clientWidth - 34;
  const step = Math.max(CELL.least, Math.min(CELL.most, Math.floor(Math.sqrt((width * 220) / map.cells))));
  const perRow = Math.max(1, Math.floor(width / step));
  const height = Math.ceil(map.cells / perRow) * step;
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const empty = getComputedStyle(document.documentElement).getPropertyValue("--free");
  const inner = step - 1;
  for (let cell = 0; cell < map.cells; cell += 1) {
    const x = (cell % perRow) * step;
    let y = Math.floor(cell / perRow) * step;
    const blocks = first(cell + 1) - first(cell);
    pen.fillStyle = empty;
    pen.fillRect(x, y, inner, inner);
    for (const layer of layers) {
      if (!layer.counts[cell]) continue;
      const part = (inner * layer.counts[cell]) / blocks;
      pen.fillStyle = layer.color;
      pen.fillRect(x, y, inner, part);
      y += part;
    }
  }
  const used = layers.reduce((sum, layer) => sum + layer.total, 0);
  const parts = [...layers.filter((layer) => layer.total), { name: "empty", color: empty, total: numBlocks - 1 - used }];
  const count = (value) => value.toLocaleString("en");
  legend.replaceChildren(...parts.map((part) => {
    const one = document.createElement("span");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = part.color;
    one.append(swatch, `${part.name}: ${count(part.total)}`);
    return one;
  }));
  const each = Math.round(numBlocks / map.cells);
  const label = parts.map((part) => `${count(part.total)} ${part.name}`).join("; ");
  canvas.setAttribute("aria-label", `${count(numBlocks)} blocks, ${each > 1 ? `about ${each} in a cell` : "one in a cell"}: ${label}`);
  canvas.onmousemove = (event) => {
    const cell = Math.floor(event.offsetY / step) * perRow + Math.floor(event.offsetX / step);
    if (cell >= map.cells || event.offsetX >= perRow * step) return;
    const found = layers.filter((layer) => layer.counts[cell]).map((layer) => `${layer.counts[cell]} ${layer.name}`);
    const last = first(cell + 1) - 1;
    const which = last > first(cell) ? `blocks ${first(cell)} to ${last}` : `block ${last}`;
    canvas.title = `${which}: ${found.join("; ") || "empty"}`;
  };
}
