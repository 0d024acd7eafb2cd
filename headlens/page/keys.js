/* Keyboard shortcuts. */

import { clamp } from "./text.js";
import { $ } from "./dom.js";
import { A, hovered, run, selected, selectedQuery, state, update } from "./state.js";
import { toggleTheme } from "./colours.js";
import { moveHead, select } from "./grid.js";
import { hoverCell } from "./detail.js";
import { goStep, togglePlay } from "./player.js";
import { toggleCompare } from "./controls.js";
import { choosePrompt } from "./finding.js";
import { openHelp } from "./help.js";
import { shownTab } from "./tabs.js";
import { moveStoryQuery, showStory } from "./story.js";

function moveCell(right, down) {
  if (selected() === null) return; // no heatmap
  const query = clamp((hovered.query ?? selectedQuery()) + down, 0, A.T - 1);
  const key = clamp((hovered.key ?? query) + right, 0, query);
  update({ query });
  hoverCell({ query, key });
}

function closeTop() {
  if (state.view === "story") update({ query: null });
  else if (selected() === null) showStory();
  else select(null);
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const SHORTCUTS = {
  ",": () => goStep(-1),
  ".": () => goStep(1),
  " ": togglePlay,
  p: () => choosePrompt((state.prompt + 1) % run.prompts.length),
  v: () => update({ map: state.map === "valued" ? "weights" : "valued" }),
  d: toggleCompare,
  t: toggleTheme,
  "?": () => openHelp(),
  Escape: closeTop,
};
const OF_ALL_HEADS = ["v", "d"]; // the first screen does not show what they change

export function onKey(event) {
  const { key, target } = event;
  if (shownTab() !== "heads" || target.matches("[role=tab]")) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector("dialog[open]")) return;
  const typing = target.matches("select, textarea, input:not([type=range], [type=checkbox], [type=radio])");
  if (typing && (key !== "Escape" || target.matches("textarea"))) return;
  // These elements handle the space key themselves. On the enlarged head it would do nothing.
  if (key === " " && target.matches('button:not([aria-pressed="true"]), input')) return;
  if (key in ARROWS) {
    if (target.matches("input")) return;
    if (state.view === "story") {
      if (target.id !== "story-tokens") return;
      moveStoryQuery(...ARROWS[key]);
    } else if (target.id === "text" && ARROWS[key][0] && !event.shiftKey) {
      Object.assign(hovered, { query: null, key: null });
      update({ query: clamp(selectedQuery() + ARROWS[key][0], 0, A.T - 1) });
    } else if (event.shiftKey) moveCell(...ARROWS[key]);
    else moveHead(...ARROWS[key]);
    event.preventDefault();
  } else if (state.view === "story" && OF_ALL_HEADS.includes(key)) return;
  else if (Object.hasOwn(SHORTCUTS, key)) {
    event.preventDefault();
    SHORTCUTS[key]();
  }
}
