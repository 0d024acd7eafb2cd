// Charts that can be read: a cursor at the nearest logged step shows the value of every line.
// The numbers are in the SVG itself: data-points="step:value step:value ..." on each line.

function element(name, parent, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent.appendChild(made);
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] <= sorted[low] - wanted ? low - 1 : low;
}

function readLine(path) {
  const points = path.dataset.points.split(" ").map((point) => point.split(":"));
  return {
    name: path.dataset.name, classes: path.getAttribute("class"),
    steps: points.map((point) => Number(point[0])), values: points.map((point) => point[1]),
  };
}

function readable(plot) {
  const {x0, x1, y0, y1} = plot.dataset;
  const readout = plot.closest("figure").querySelector(".readout");
  const atRest = [...readout.childNodes];
  const lines = [...plot.querySelectorAll("[data-points]")].map(readLine);
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  let cursor = null, at = steps.length - 1;

  const acrossOf = (step) => `${100 * (step - x0) / (x1 - x0)}%`;
  const downOf = (value) => `${100 * (y1 - value) / (y1 - y0)}%`;

  function leave() {
    cursor?.remove();
    cursor = null;
    readout.replaceChildren(...atRest);
  }

  function say(classes, text) {
    const span = document.createElement("span");
    span.className = classes;
    span.textContent = text;
    readout.append(span);
  }

  function show(index) {
    leave();
    at = Math.min(Math.max(index, 0), steps.length - 1);
    const step = steps[at], across = acrossOf(step);
    cursor = element("g", plot, {});
    element("line", cursor, {class: "cursor", x1: across, x2: across, y1: 0, y2: "100%"});
    readout.replaceChildren();
    say("step", `step ${step.toLocaleString("en")}`);
    for (const line of lines) {
      const i = nearest(line.steps, step), there = line.steps[i], value = line.values[i];
      element("circle", cursor, {
        class: `dot ${line.classes}`, r: 4, cx: acrossOf(there), cy: downOf(Number(value)),
      });
      const when = there === step ? "" : ` at step ${there.toLocaleString("en")}`;
      say(line.classes, `${line.name} ${value}${when}`);
    }
  }

  plot.addEventListener("pointermove", (event) => {
    const box = plot.querySelector(".area").getBoundingClientRect();
    const wanted = Number(x0) + (event.clientX - box.left) / box.width * (x1 - x0);
    show(nearest(steps, wanted));
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length}[event.key];
    if (!move) return;
    event.preventDefault();
    show(cursor ? at + move : at);
  });
}

for (const plot of document.querySelectorAll("svg.plot")) readable(plot);
