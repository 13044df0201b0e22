"use strict";
// What every page uses. No name and no text of a request is ever put in as HTML.

const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI; // its name looks like an address
const at = (id) => document.getElementById(id);
function made(node, text, attributes) {
  if (text !== "") node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
const element = (name, text = "", attributes = {}) => made(document.createElement(name), text, attributes);
const shape = (name, attributes, text = "") => made(document.createElementNS(SVG, name), text, attributes);

const known = (value) => value !== null && value !== undefined;
const fixed = (digits) => (value) => known(value) ? value.toFixed(digits) : "–";
const short = (value) => String(Number(value.toPrecision(3)));
const percent = (value) => known(value) && Number.isFinite(value) ? `${(100 * value).toFixed(1)} %` : "–";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }); // made once: that is what takes long
const whole = (value) => known(value) ? grouped.format(value) : "–";
const seconds = (s) => !known(s) ? "–" : s === 0 ? "0" : s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1e3).toFixed(s < 0.01 ? 2 : 0)} ms`;

// Chart: its size and margins; a linear scale to a tenth of a pixel; axes with ticks of [value, text].
const W = 440, H = 220, LEFT = 50, BOTTOM = 24, TOP = 8, RIGHT = 10;
const scale = (from, to, low, high) => (v) => Number((from + (to - from) * (high > low ? (v - low) / (high - low) : 0.5)).toFixed(1));
function frame(label, xs, ys, x, y) {
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  svg.append(shape("path", { class: "axis", d: `M${LEFT} ${TOP}V${H - BOTTOM}H${W - RIGHT}` }));
  for (const [value, text] of ys) svg.append(shape("text", { x: LEFT - 4, y: y(value) + 4, "text-anchor": "end" }, text));
  for (const [value, text] of xs) svg.append(shape("text", { x: x(value), y: H - 8, "text-anchor": "middle" }, text));
  return svg;
}

// Columns are [heading, of a row: text or node, class]; column `heads` of each row is its header.
function fill(id, caption, columns, rows, heads = 1) {
  const head = element("thead"), line = element("tr"), body = element("tbody");
  for (const [heading, , kind = "number"] of columns) line.append(element("th", heading, { scope: "col", class: kind }));
  head.append(line);
  for (const each of rows) {
    const row = element("tr");
    columns.forEach(([, of, kind = "number"], i) => {
      const cell = i === heads - 1 ? element("th", "", { scope: "row" }) : element("td", "", { class: kind });
      cell.append(of(each));
      row.append(cell);
    });
    body.append(row);
  }
  at(id).replaceChildren(element("caption", caption, { class: "legend" }), head, body);
}

