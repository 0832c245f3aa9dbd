// The frame of a panel: heading, note, tools; and the dialog that shows its figure as a table.

import { h, show, type Child } from "./dom";

export interface Rows {
  columns: string[];
  rows: (string | number | null)[][];
}

export class Panel {
  readonly element: HTMLElement;
  readonly body: HTMLDivElement;
  readonly tools: HTMLSpanElement;
  private readonly heading: HTMLSpanElement;
  private readonly note: HTMLElement;
  private noteText = "";

  constructor(title: string, size: string, table?: () => Rows, csv?: () => string) {
    this.heading = h("span", { class: "name" }, title);
    this.note = h("small");
    this.tools = h("span", { class: "tools" });
    this.body = h("div");
    this.element = h("section", { class: size, "aria-label": title, tabindex: -1 }, h("h2", {}, this.heading, this.note, this.tools), this.body);
    if (table) {
      const open = (): void => openTable(title, table(), csv?.());
      this.tools.append(h("button", { type: "button", click: open, "aria-label": `${title} as a table`, title: "Show as a table" }, "table"));
    }
  }

  /** Set the text beside the heading. */
  describe(text: string): void {
    this.noteText = text;
    this.note.textContent = text;
    this.note.title = text;
  }

  /** Show a text beside the heading for now; "" restores the note. */
  point(text: string): void {
    this.note.textContent = text || this.noteText;
  }

  rename(title: string): void {
    this.heading.textContent = title;
  }

  fill(...children: Child[]): void {
    show(this.body, ...children);
  }
}

export function tableOf({ columns, rows }: Rows): HTMLTableElement {
  const isNumber = columns.map((_, at) => rows.some((row) => typeof row[at] === "number"));
  const cell = (value: string | number | null, at: number): HTMLTableCellElement =>
    h("td", { class: isNumber[at] ? "n" : "text" }, value === null ? "" : String(value));
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ...columns.map((name, at) => h("th", { scope: "col", class: isNumber[at] ? "n" : "" }, name)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell)))),
  );
}

function openTable(title: string, rows: Rows, csv?: string): void {
  const text = [rows.columns, ...rows.rows].map((row) => row.map((value) => value ?? "").join("\t")).join("\n");
  const copy = h("button", { type: "button" }, "Copy");
  copy.addEventListener("click", () => {
    navigator.clipboard.writeText(text).then(
      () => (copy.textContent = "Copied"),
      () => (copy.textContent = "The browser refused"),
    );
  });
  const dialog = h(
    "dialog",
    { "aria-label": `${title} as a table`, close: () => dialog.remove() },
    h("form", { method: "dialog", class: "bar" }, h("b", {}, title), copy, csv ? h("a", { href: csv, download: "curve.csv" }, "CSV with all points") : null, h("button", {}, "Close")),
    h("div", { class: "scroll", tabindex: 0 }, tableOf(rows)),
  );
  document.body.append(dialog);
  dialog.showModal();
}
