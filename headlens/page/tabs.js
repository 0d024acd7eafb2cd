/* The tabs at the top of the page. The address remembers the tab: #tab=training. */

import { $ } from "./dom.js";

const buttons = () => [...$("tabs").children].filter((button) => !button.hidden);
const panelOf = (button) => $(button.getAttribute("aria-controls"));
const tabOf = (button) => button.id.replace("show-", "");
let onShow = () => {};

/** Returns the name of the shown tab, such as "heads". */
export const shownTab = () => tabOf(buttons().find((button) => button.ariaSelected === "true"));

/** Returns the tab of an address, "" if it names none that the page has. */
export function tabOfLink(link) {
  const name = new URLSearchParams(link.replace(/^.*#/, "")).get("tab");
  return buttons().map(tabOf).find((known) => known === name) ?? "";
}

/** Offers these tabs. show(name) is called after one is shown. */
export function buildTabs(names, show) {
  $("tabs").hidden = names.length < 2;
  onShow = show;
  for (const button of $("tabs").children) {
    button.hidden = !names.includes(tabOf(button));
    button.addEventListener("click", () => openTab(tabOf(button)));
  }
  $("tabs").addEventListener("keydown", (event) => {
    const all = buttons();
    const at = all.indexOf(event.target);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = all.at(to % all.length);
    openTab(tabOf(next));
    next.focus();
  });
}

/** Shows a tab. */
export function showTab(name) {
  for (const button of $("tabs").children) {
    const isShown = tabOf(button) === name;
    button.ariaSelected = isShown;
    button.tabIndex = isShown ? 0 : -1;
    panelOf(button).hidden = !isShown;
  }
  onShow(name);
}

/** Shows a tab that the user has selected, and writes it to the address. */
function openTab(name) {
  showTab(name);
  scrollTo(0, 0);
  if (name === "heads") return; // link.js writes the view of the heads
  try {
    history.replaceState(null, "", `#tab=${name}`);
  } catch {
    // A sandboxed frame has no address.
  }
}
