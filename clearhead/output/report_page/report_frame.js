// Shows report.html in a frame. A new version is loaded behind the old one and scrolled to its place:
// report_page/main.js tells and takes the position, because the frame has another origin.

import { poll } from "../../../headlens/page/polling.js";

const place = document.querySelector("main");
const status = document.getElementById("status");
let position = 0; // of the shown report, in pixels
let version = "";
let shown = null;
let text = ""; // about the run

addEventListener("message", ({ source, data }) => {
  if (source === shown?.contentWindow && Number.isFinite(data?.scrolled)) position = data.scrolled;
});

function loadReport() {
  const frame = document.createElement("iframe");
  Object.assign(frame, { src: "report.html", title: "report", className: "loading" });
  frame.addEventListener("load", () => {
    frame.contentWindow.postMessage({ scroll: position }, "*");
    setTimeout(() => { // after it was scrolled
      shown?.remove();
      shown = frame;
      frame.className = "";
    }, 100);
  }, { once: true });
  place.append(frame);
}

function take({ report, state }) {
  text = report === "()" ? "This run has no report yet. It appears here."
    : state === "running" ? "The run is training: new versions of the report appear here." : "";
  if (report === version || report === "()") return;
  version = report;
  loadReport();
}

function tell(found) {
  const lost = found ? "This run was removed." : "Not connected.";
  status.textContent = found === 200 ? text : lost;
}

poll("state.json", take, tell);
