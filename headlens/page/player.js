/* Plays the steps of a run: on the first screen once in twelve seconds, with all that is between the
 * steps, and on the screen of all heads one step after the other. */

import { clamp } from "./text.js";
import { showMessage } from "./dom.js";
import { decode } from "./data.js";
import { run, state, update } from "./state.js";

const STORY_SECONDS = 10;
const FIRST_SECONDS = 1.5; // for which the first step is shown
const STEP = 333; // milliseconds for a step, on the screen of all heads
export const still = matchMedia("(prefers-reduced-motion: reduce)");
let playing = false;
let playTimer;
let position = null; // a frame and the part of the way to the next one, while the first screen plays
let part = 0; // of the first screen that was played, 0 to 1

export const isPlaying = () => playing;
export const shownPosition = () => position ?? state.frame;
export const playedPart = () => (position === null ? 1 : Math.max(0, part));

export function togglePlay() {
  if (playing) pause();
  else if (run.frames.length > 1) {
    playing = true;
    const over = state.frame === run.frames.length - 1;
    // All heads with all names, as they get them.
    update({ ...(over ? { frame: 0 } : {}), name: "", off: "" });
    if (state.view === "story" && !still.matches) glide();
    else playTimer = setTimeout(tick, STEP);
  }
}

function glide() {
  const { pace } = run.story.prompts[state.prompt];
  const last = pace.length - 1;
  position = state.frame;
  part = pace[state.frame] || -FIRST_SECONDS / STORY_SECONDS;
  let before = performance.now();
  const next = (now) => {
    if (!playing) return;
    const missing = [Math.floor(position), Math.min(Math.floor(position) + 1, last)]
      .find((frame) => !run.frames[frame].bytes);
    if (missing === undefined) {
      const passed = clamp(now - before, 0, 100); // a hidden tab draws nothing
      part = Math.min(1, part + passed / 1000 / STORY_SECONDS);
      const from = part === 1 ? last : Math.max(0, pace.findLastIndex((at) => at <= part));
      const length = pace[from + 1] - pace[from];
      position = from === last ? last : from + Math.max(0, part - pace[from]) / length;
      const frame = Math.round(position);
      if (frame !== state.frame) update({ frame });
      if (part === 1) return pause();
    } else {
      decode(run, missing).catch((error) => {
        pause();
        showMessage(error.message);
      });
    }
    before = now;
    playTimer = requestAnimationFrame(next);
  };
  playTimer = requestAnimationFrame(next);
}

async function tick() {
  const begin = performance.now();
  await update({ frame: Math.min(state.frame + 1, run.frames.length - 1) });
  if (!playing) return;
  if (state.frame === run.frames.length - 1) return pause();
  const took = performance.now() - begin;
  playTimer = setTimeout(tick, Math.max(0, STEP - took));
}

export function pause() {
  clearTimeout(playTimer);
  if (!playing) return;
  playing = false;
  position = null;
  update();
}

/** Shows a frame. At another one, all heads are on. */
export const showFrame = (frame) => update({ frame, off: frame === state.frame ? state.off : "" });

export function goStep(by) {
  pause();
  showFrame(clamp(state.frame + by, 0, run.frames.length - 1));
}
