/* Plays the steps of a run. */

import { clamp } from "./text.js";
import { $ } from "./dom.js";
import { run, state, update } from "./state.js";

let playing = false;
let playTimer;

export const isPlaying = () => playing;

export function togglePlay() {
  if (playing) pause();
  else if (run.frames.length > 1) {
    playing = true;
    const over = state.frame === run.frames.length - 1;
    update({ ...(over ? { frame: 0 } : {}), name: "" }); // all heads, as they get their names
    playTimer = setTimeout(tick, 1000 / Number($("speed").value));
  }
}

async function tick() {
  const begin = performance.now();
  await update({ frame: Math.min(state.frame + 1, run.frames.length - 1) });
  if (!playing) return;
  if (state.frame === run.frames.length - 1) return pause();
  const took = performance.now() - begin;
  playTimer = setTimeout(tick, Math.max(0, 1000 / Number($("speed").value) - took));
}

export function pause() {
  clearTimeout(playTimer);
  if (!playing) return;
  playing = false;
  update();
}

export function goStep(by) {
  pause();
  update({ frame: clamp(state.frame + by, 0, run.frames.length - 1) });
}
