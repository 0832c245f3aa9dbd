// Ranks or GPUs over time as a map of colours; a click opens a rank.

import { h, theme } from "./dom";
import { age, count, seconds } from "./format";
import { amount } from "./machine";
import { Panel, tableOf } from "./panel";
import type { MapRow, Store } from "./store";

// Cividis: a sequential scale that colour-blind people see as others do.
const SCALE = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const AXES = ["pp", "dp", "cp", "tp"] as const;

interface RankState {
  rank: number;
  host: string;
  pid: number;
  phase: string;
  step: number;
  time: number;
  spent_s: Record<string, number>;
}

function colourOf(share: number): string {
  const at = Math.min(1, Math.max(0, share)) * (SCALE.length - 1);
  const [low, high] = [SCALE[Math.floor(at)]!, SCALE[Math.ceil(at)]!];
  const mix = (from: number): number => {
    const [a, b] = [parseInt(low.slice(from, from + 2), 16), parseInt(high.slice(from, from + 2), 16)];
    return Math.round(a + (b - a) * (at % 1));
  };
  return `rgb(${mix(1)} ${mix(3)} ${mix(5)})`;
}

export class RankMapPanel {
  readonly panel: Panel;
  private readonly canvas = h("canvas", { role: "img", tabindex: -1 });
  private readonly choices = h("span", { class: "choices" });
  private order = "node";
  private rows: { row: MapRow; at: number; y: number; height: number }[] = [];

  constructor(
    private readonly store: Store,
    private readonly link: (path: string, query: Record<string, string>) => string,
    private readonly onMap: (title: string) => void,
  ) {
    this.panel = new Panel("Ranks over time", "w12", () => ({
      columns: ["row", ...(this.store.tables.map?.x ?? []).map((x) => `${x} s`)],
      rows: (this.store.panels.map?.rows ?? []).map((row, at) => [this.name(row), ...(this.store.tables.map?.[String(at)] ?? [])]),
    }));
    this.panel.tools.prepend(this.choices);
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => this.panel.point(""));
    new ResizeObserver(() => this.draw()).observe(this.panel.body);
  }

  private name(row: MapRow): string {
    const place = AXES.filter((axis) => row[axis] !== undefined).map((axis) => `${axis} ${row[axis]}`);
    return [row.rank !== undefined ? `rank ${row.rank}` : `GPU ${row.gpu}`, row.node, ...place].join(" · ");
  }

  update(): void {
    const map = this.store.panels.map;
    if (!map) return;
    if (!map.titles.length) {
      this.choices.replaceChildren();
      this.panel.fill(h("p", { class: "empty" }, "A row for each rank or GPU appears here with the first samples."));
      return;
    }
    const axes = AXES.filter((axis) => map.rows.some((row) => row[axis] !== undefined));
    if (!["node", ...axes].includes(this.order)) this.order = "node";
    const ranks = map.rows.map((row) => row.rank).filter((rank) => rank !== undefined);
    this.showChoices(map.titles, map.title ?? "", axes, ranks);
    this.panel.describe(`${map.what === "gpu" ? "a row is a GPU" : "a row is a rank; click it for its phases and its output"}${map.problem ? `; ${map.problem}` : ""}`);
    this.canvas.setAttribute("aria-label", `${map.title} of ${map.rows.length} rows over time`);
    if (!this.canvas.isConnected) this.panel.fill(this.canvas);
    this.draw();
  }

  private showChoices(titles: string[], title: string, axes: string[], ranks: number[]): void {
    const key = JSON.stringify([titles, title, axes, ranks, this.order]);
    if (this.choices.dataset.key === key) return;
    this.choices.dataset.key = key;
    const select = (label: string, names: [string, string][], chosen: string, onChange: (value: string) => void): HTMLSelectElement =>
      h(
        "select",
        { "aria-label": label, change: (event) => onChange((event.target as HTMLSelectElement).value) },
        ...names.map(([value, text]) => h("option", { value, selected: value === chosen }, text)),
      );
    this.choices.replaceChildren(
      select("What the map shows", titles.map((name) => [name, name]), title, (value) => this.onMap(value)),
      ...(axes.length ? [select("Order of the rows", ["node", ...axes].map((name) => [name, `by ${name}`]), this.order, (value) => this.sortBy(value))] : []),
      ...(ranks.length
        ? [select("Open a rank", [["", "open rank"], ...ranks.map((rank): [string, string] => [String(rank), `rank ${rank}`])], "", (value) => value && void this.open(Number(value)))]
        : []),
    );
  }

  private sortBy(order: string): void {
    this.order = order;
    this.update();
  }

  private groupOf(row: MapRow): string {
    return this.order === "node" ? row.node : `${this.order} ${row[this.order as (typeof AXES)[number]] ?? "–"}`;
  }

  private draw(): void {
    const map = this.store.panels.map;
    const table = this.store.tables.map;
    const width = this.panel.body.clientWidth;
    if (!map?.rows.length || !table?.x || !width) return;
    const order = map.rows.map((row, at) => ({ row, at, group: this.groupOf(row) }));
    if (this.order !== "node") order.sort((one, other) => one.group.localeCompare(other.group, "en", { numeric: true }) || one.at - other.at);
    const height = Math.max(3, Math.min(18, 420 / order.length));
    const left = Math.min(110, width * 0.28);
    const groups = new Set(order.map((entry) => entry.group)).size;
    const total = order.length * height + (groups - 1) * 5 + 22;
    const ratio = devicePixelRatio;
    this.canvas.width = width * ratio;
    this.canvas.height = total * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${total}px`;
    const context = this.canvas.getContext("2d");
    if (!context) return;
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    const values = order.flatMap(({ at }) => (table[String(at)] ?? []) as (number | null)[]).filter((value) => value !== null);
    const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const low = map.unit === "%" ? 0 : values.reduce((a, b) => Math.min(a, b), Infinity);
    const cell = (width - left) / table.x.length;
    let y = 0;
    let group = order[0]!.group;
    let begin = 0;
    this.rows = [];
    const label = (end: number): void => {
      context.fillStyle = theme("mut");
      context.textAlign = "right";
      const text = group.length > 16 ? `${group.slice(0, 15)}…` : group;
      context.fillText(text, left - 8, (begin + end) / 2 + 4);
    };
    for (const entry of order) {
      if (entry.group !== group) {
        label(y);
        y += 5;
        [group, begin] = [entry.group, y];
      }
      const row = (table[String(entry.at)] ?? []) as (number | null)[];
      row.forEach((value, at) => {
        if (value === null) return;
        context.fillStyle = colourOf((value - low) / (high - low || 1));
        context.fillRect(left + at * cell, y, cell + 0.4, Math.max(1, height - 1));
      });
      this.rows.push({ row: entry.row, at: entry.at, y, height });
      y += height;
    }
    label(y);
    this.drawAxis(context, left, y, width, (table.x as number[])[table.x.length - 1]! + (map.width_s ?? 1));
    this.drawScale(context, width, y, low, high, map.unit ?? "");
  }

  private drawAxis(context: CanvasRenderingContext2D, left: number, y: number, width: number, end: number): void {
    context.fillStyle = theme("mut");
    context.textAlign = "left";
    context.fillText("0", left, y + 16);
    if (width < 640) return; // the colour scale is there
    context.textAlign = "center";
    context.fillText(seconds(end / 2), left + (width - left) / 2, y + 16);
  }

  private drawScale(context: CanvasRenderingContext2D, width: number, y: number, low: number, high: number, unit: string): void {
    const size = 80;
    const right = width - 62;
    for (let at = 0; at < size; at++) {
      context.fillStyle = colourOf(at / size);
      context.fillRect(right - size + at, y + 7, 1.5, 9);
    }
    context.fillStyle = theme("mut");
    context.textAlign = "right";
    context.fillText(amount(low, unit), right - size - 5, y + 16);
    context.textAlign = "left";
    context.fillText(amount(high, unit), right + 5, y + 16);
  }

  private find(event: MouseEvent): { row: MapRow; at: number; cell: number } | null {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    const found = this.rows.find((entry) => y >= entry.y && y < entry.y + entry.height);
    const left = Math.min(110, box.width * 0.28);
    const cells = this.store.tables.map?.x?.length ?? 0;
    return found ? { ...found, cell: Math.floor(((event.clientX - box.left - left) / (box.width - left)) * cells) } : null;
  }

  private point(event: MouseEvent): void {
    const found = this.find(event);
    const value = found && this.store.tables.map?.[String(found.at)]?.[found.cell];
    const x = found && this.store.tables.map?.x?.[found.cell];
    this.panel.point(found && typeof value === "number" ? `${this.name(found.row)} at ${seconds(Number(x))}: ${amount(value, this.store.panels.map?.unit ?? "")}` : "");
  }

  private click(event: MouseEvent): void {
    const rank = this.find(event)?.row.rank;
    if (rank !== undefined) void this.open(rank);
  }

  /** Show the phases and the output of a rank. */
  private async open(rank: number): Promise<void> {
    const query = { rank: String(rank) };
    const [state, log] = await Promise.all([fetch(this.link("rank", query)), fetch(this.link("log", query))]).catch(() => []);
    if (!state || !log) return;
    const body: (Node | string)[] = [];
    const found = state.ok ? ((await state.json()) as RankState | { problem: string }) : { problem: await state.text() };
    if ("problem" in found) {
      body.push(h("p", { class: "note" }, found.problem));
    } else {
      const late = Date.now() / 1000 - this.store.clockAhead - found.time;
      body.push(h("p", {}, `${found.phase} after step ${count(found.step)}; heartbeat ${age(Math.max(0, late))}; process ${found.pid} on ${found.host}`));
      const rows = Object.entries(found.spent_s).map(([phase, value]) => [phase, seconds(value)]);
      body.push(tableOf({ columns: ["phase", "mean of the recent steps"], rows }));
    }
    body.push(h("h3", {}, "Output"), h("pre", {}, (await log.text()) || "no output"));
    const dialog = h(
      "dialog",
      { "aria-label": `Rank ${rank}`, close: () => dialog.remove() },
      h("form", { method: "dialog", class: "bar" }, h("b", {}, `Rank ${rank}`), h("button", {}, "Close")),
      h("div", { class: "scroll", tabindex: 0 }, ...body),
    );
    document.body.append(dialog);
    dialog.showModal();
  }
}
