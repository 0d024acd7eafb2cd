/* DOM elements, messages and canvases. */

export const $ = (id) => document.getElementById(id);

/** Returns a new element. String children become text, never markup. */
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export const bold = (text) => make("b", { textContent: text });

/** Returns the label of a token in quotes. */
export const quotedToken = (label) => make("bdi", { textContent: `"${label}"` });

/** Returns the nodes of a sentence of headlens/finding.py: parts of text, ["bold", text] and
 * ["token", label]. */
export const sentence = (parts) => parts.map((part) => (typeof part === "string" ? part
  : { bold, token: quotedToken }[part[0]](part[1])));

export function fillSelect(select, choices) {
  select.replaceChildren(...choices.map(([value, textContent, disabled = false]) =>
    make("option", { value, textContent, disabled })));
}

/** Selects one of the radio buttons of a fieldset. */
export function checkRadio(id, value) {
  for (const input of $(id).querySelectorAll("input")) input.checked = input.value === value;
}

let messageTimer;

export function showMessage(text) {
  $("message").textContent = text;
  $("message").hidden = false;
  clearTimeout(messageTimer);
  messageTimer = setTimeout(() => ($("message").hidden = true), 6000);
}

export let isPrinted = false;

export function setPrinted(printed) {
  isPrinted = printed;
}

/** Clears a canvas and resizes it to the resolution of the screen. Returns a context in CSS pixels. */
export function prepareCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  // Chromium prints a canvas that was cleared as opaque, over the canvas below, unless it was read.
  if (isPrinted) canvas.toDataURL();
  return context;
}

export function line(context, points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
}

export function dot(context, x, y, size) {
  context.beginPath();
  context.arc(x, y, size, 0, 2 * Math.PI);
  context.fill();
}
