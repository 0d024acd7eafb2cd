/* Colour scales and the light and dark theme. */

import { clamp } from "./text.js";
import { state, update } from "./state.js";

// Blue: less weight; orange: more. Zero is light in the light theme and dark in the dark theme.
const DIVERGING = {
  light: "0:053061 64:3a87bd 128:fafafa 191:e08a1e 255:7a3606",
  dark: "0:8fd0ff 64:4a95de 112:2f5f92 128:2e3237 144:8a5a20 191:de8a30 255:ffc46b",
};

const rgb = (hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0; // as in ImageData

/** Returns 256 colours [r, g, b], interpolated between "position:colour ...". */
function ramp(anchors) {
  const points = anchors.trim().split(/\s+/).map((point) => {
    const [place, hex] = point.split(":");
    return { place: Number(place), colour: rgb(hex) };
  });
  return Array.from({ length: 256 }, (_, i) => {
    const right = Math.max(1, points.findIndex((point) => point.place >= i));
    const [from, to] = [points[right - 1], points[right]];
    const part = (i - from.place) / (to.place - from.place);
    return from.colour.map((c, n) => Math.round(c + (to.colour[n] - c) * part));
  });
}

export const viridis = ramp("__VIRIDIS__"); // of headlens/heatmap.py
export const viridisPacked = Uint32Array.from(viridis, packed);
export const WEIGHTS = Float64Array.from({ length: 256 }, (_, code) => (code / 255) ** 2);

export const dark = matchMedia("(prefers-color-scheme: dark)");
export const colours = {}; // colours of the current theme, for canvases

/** Reads the colours of the theme. isPrinted: dark ink on light paper. */
export function readTheme(isPrinted = false) {
  const theme = isPrinted ? "light" : state.theme;
  const isDark = theme === "auto" ? dark.matches : theme === "dark";
  document.documentElement.style.colorScheme = theme === "auto" ? "" : theme;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const sample = document.createElement("i"); // resolves light-dark()
  sample.style.forcedColorAdjust = "none";
  document.body.append(sample);
  for (const name of ["page", "ink", "muted", "line", "tint", "accent", "other"]) {
    sample.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(sample).color;
  }
  sample.remove();
  colours.isDark = isDark;
  const channels = (colour) => colour.match(/\d+/g).map(Number);
  colours.background = channels(colours.page);
  colours.masked = packed(channels(colours.tint));
  colours.diverging = ramp(isDark ? DIVERGING.dark : DIVERGING.light);
  colours.divergingPacked = Uint32Array.from(colours.diverging, packed);
}

export function toggleTheme() {
  state.theme = colours.isDark ? "light" : "dark";
  readTheme();
  update();
}

/** Returns black or white: the colour of text with more contrast on a colour [r, g, b]. */
function textOn(colour) {
  const [r, g, b] = colour.map((c) => c / 255)
    .map((c) => (c > 0.04 ? ((c + 0.055) / 1.055) ** 2.4 : c / 12.92));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

export const ATTENTION = [255, 176, 32]; // of text: a large weight
export const [LESS, MORE] = [[60, 130, 215], [235, 125, 20]]; // colours of text in a comparison

/** Gives text a background and a readable colour. alpha: 0 to 1. */
export function shade(span, colour, alpha) {
  if (alpha <= 0.01) return;
  span.style.backgroundColor = `rgb(${colour.join(" ")} / ${alpha.toFixed(3)})`;
  span.style.color = textOn(colours.background.map((c, n) => c + alpha * (colour[n] - c)));
}

/** Returns the position of a weight on the colour scale, 0 to 1; `most` is the weight at 1. */
export const height = (value, most = 1) => Math.sqrt(clamp(value / most, 0, 1));
