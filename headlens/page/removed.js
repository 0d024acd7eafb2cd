/* What happens without a head: loss and accuracy when heads are removed, see headlens/finding.py. */

import { stepText } from "./text.js";
import { $, bold, make, sentence } from "./dom.js";
import { A, B, indexInB, isMeasured, other, run, selected, sideName } from "./state.js";
import { ACCURACY } from "./losses.js";
import { fillTag, kindOf } from "./names.js";

/** Returns where the values are from, for a side that shows another step. */
const elsewhere = (of) =>
  (isMeasured(of) ? "" : `Measured at ${stepText(of.run.removed.step)}. `);

/** Returns for each run with removed heads one side, if possible at the step of the measurement. */
const measuredSides = () => [run, other].flatMap((of) => {
  const sides = [A, B].filter((side) => of?.removed && side?.run === of);
  return sides.find(isMeasured) ?? sides.slice(0, 1);
});
const prefix = (of) => (B ? [bold(sideName(of)), " · "] : []);
const noteOf = (textContent) => make("p", { className: "note", textContent });

/** Shows the loss without the enlarged head, and without all heads of its name. */
export function drawRemoved() {
  const placeIn = (of) => (of.run === run ? selected() : indexInB(selected()));
  const sides = selected() === null ? [] : measuredSides().filter((of) => placeIn(of) >= 0);
  $("removed").hidden = !sides.length;
  $("removed").replaceChildren(make("h3", { textContent: "What happens without it?" }),
    ...sides.flatMap((of) => {
      const { findings, groups, notes } = of.run.removed;
      const said = make("p", {}, ...prefix(of), elsewhere(of),
        ...sentence(findings[placeIn(of)]));
      return groups.length ? [said] : [said, noteOf(notes[0])];
    }));
}

function groupRows({ key, cells: [title, ...values], meaning, is_noise: isNoise }) {
  const tag = make("span");
  if (kindOf(key)) fillTag(tag, kindOf(key));
  const more = make("td", { colSpan: values.length + 1, className: "note", textContent: meaning });
  return [
    make("tr", { className: isNoise ? "noise" : "" },
      make("th", { scope: "row" }, ...(key ? [tag, " "] : []), title),
      ...values.map((textContent) => make("td", { className: "number", textContent }))),
    ...(meaning ? [make("tr", {}, more)] : []),
  ];
}

function groupTable({ columns, groups, notes }) {
  const head = columns.map((textContent, n) =>
    make("th", { scope: "col", textContent, className: n ? "number" : "",
      title: textContent === "accuracy" ? ACCURACY : "" }));
  return [make("table", {}, make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...groups.flatMap(groupRows))),
  ...(groups.some((group) => group.is_noise) ? [noteOf("grey: not clearly different from 0")] : []),
  noteOf(notes[0])];
}

/** Shows the loss without all heads of each name. */
export function drawGroups() {
  const sides = measuredSides().filter((of) => of.run.removed.groups.length);
  $("groups").hidden = !sides.length;
  if (!sides.length) return;
  $("groups").replaceChildren(
    make("h2", { textContent: "What if all heads of one kind are removed?" }),
    ...sides.flatMap((of) => [
      ...(B || elsewhere(of) ? [make("p", {}, ...prefix(of), elsewhere(of))] : []),
      ...groupTable(of.run.removed),
    ]),
    noteOf(sides[0].run.removed.notes[1]));
}
