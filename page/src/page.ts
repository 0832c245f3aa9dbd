// The page of `paceline watch`: one stream of changes, and the panels that show them.

import "uplot/dist/uPlot.min.css";
import "./page.css";
import { CurvePanels } from "./curves";
import { h, show } from "./dom";
import { age, clock, count, date, energy, money, number, percent, short } from "./format";
import { ComparePanels } from "./compare";
import { FiguresPanel } from "./figures";
import { FindingsPanel } from "./findings";
import { MachinePanels } from "./machine";
import { RankMapPanel } from "./map";
import { PipelinePanel } from "./pipeline";
import { Panel } from "./panel";
import { PartsPanels } from "./parts";
import { StudyPanel } from "./study";
import { Store, type Message, type RunRow } from "./store";

const HELP = "Keys: r list of runs · j and k next and previous run · a axis · l logarithm of the loss · Escape show all · / filter";

class Page {
  private readonly store = new Store();
  private readonly header = h("header", { class: "page" });
  private readonly alerts = h("div", { class: "bar", role: "status", "aria-live": "polite" });
  private readonly controls = h("div", { class: "bar" });
  private readonly machineControls = h("div", { class: "bar" });
  private readonly main = h("main");
  private readonly runs = new Panel("Runs", "w12", () => this.runTable());
  private readonly log = new Panel("Log", "w12", () => ({
    columns: ["time", "event", "text"],
    rows: (this.store.tables.log?.time ?? []).map((time, at) => [date(Number(time)), this.cell("kind", at), this.cell("text", at)]),
  }));
  private readonly findings = new FindingsPanel(this.store);
  private readonly parts = new PartsPanels(this.store);
  private readonly curves = new CurvePanels(this.store, (path, query) => this.link(path, query), () => this.layOut());
  private readonly machine = new MachinePanels(this.store, (node) => this.go({ node }));
  private readonly map = new RankMapPanel(this.store, (path, query) => this.link(path, query), (map) => this.go({ map }));
  private readonly compare = new ComparePanels(this.store);
  private readonly pipeline = new PipelinePanel(this.store);
  private readonly figures = new FiguresPanel(this.store, (path, query) => this.link(path, query));
  private readonly study = new StudyPanel(this.store);
  private stream: EventSource | null = null;
  private isConnected = true;
  private run = "";
  private axis = "step";
  private filter = "";
  private node = "";
  private mapTitle = "";
  private others: string[] = [];
  private isFrameDue = false;
  private changed = new Set<string>();

  start(): void {
    show(document.body, this.header, this.main);
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.press(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
    setInterval(() => this.showHeader(), 1000);
    this.route();
  }

  private link(path: string, query: Record<string, string>): string {
    return `${path}?${new URLSearchParams({ run: this.run, ...query })}`;
  }

  private route(): void {
    const query = new URLSearchParams(location.hash.slice(1));
    const run = query.get("run") ?? "";
    if (run !== this.run) {
      this.store.clear();
      this.curves.clear();
      this.machine.clear();
    }
    this.run = run;
    this.axis = query.get("axis") ?? "step";
    this.filter = query.get("filter") ?? "";
    this.node = query.get("node") ?? "";
    this.mapTitle = query.get("map") ?? "";
    this.others = (query.get("with") ?? "").split(",").filter((id) => id && id !== run);
    this.connect();
    this.layOut();
    this.showRuns();
  }

  private go(change: Record<string, string>): void {
    const query = new URLSearchParams({ run: this.run, axis: this.axis, filter: this.filter, node: this.node, map: this.mapTitle, with: this.others.join(","), ...change });
    for (const [name, value] of [...query]) if (!value || (name === "axis" && value === "step")) query.delete(name);
    location.hash = query.toString();
  }

  private connect(): void {
    this.stream?.close();
    const query: Record<string, string> = { axis: this.axis, filter: this.filter, node: this.node, map: this.mapTitle, with: this.others.join(",") };
    if (this.run) query.run = this.run;
    this.stream = new EventSource(`stream?${new URLSearchParams(query)}`);
    this.stream.onopen = () => this.setConnected(true);
    this.stream.onerror = () => {
      this.setConnected(false);
      if (this.stream?.readyState === EventSource.CLOSED) setTimeout(() => this.connect(), 2000);
    };
    this.stream.onmessage = (event) => this.take(JSON.parse(event.data as string) as Message);
  }

  private setConnected(isConnected: boolean): void {
    if (this.isConnected !== isConnected) {
      this.isConnected = isConnected;
      this.showAlerts();
    }
  }

  private take(message: Message): void {
    for (const name of this.store.apply(message)) this.changed.add(name);
    const rows = this.store.panels.runs ?? [];
    if (!this.run && rows.length === 1 && !this.study.isShown && !location.hash) location.replace(`#run=${rows[0]!.id}`);
    if (!this.isFrameDue) {
      this.isFrameDue = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  private draw(isAll = false): void {
    this.isFrameDue = false;
    const changed = this.changed;
    this.changed = new Set();
    if (isAll || changed.has("curves") || changed.has("gone") || changed.has("machine") || changed.has("comparison") || changed.has("pipeline") || changed.has("figures") || changed.has("study")) this.layOut();
    if (isAll || [...changed].some((name) => /^(curve|other|comparison)/.test(name))) this.curves.update();
    if (isAll || changed.has("parts") || changed.has("curves")) this.parts.update();
    if (isAll || changed.has("findings") || changed.has("gone")) this.findings.update();
    if (isAll || [...changed].some((name) => name.startsWith("machine"))) this.machine.update();
    if (isAll || changed.has("comparison") || changed.has("header") || changed.has("origin")) this.compare.update();
    if (isAll || changed.has("pipeline")) this.pipeline.update();
    if (isAll || changed.has("figures")) this.figures.update();
    if (isAll || changed.has("map")) this.map.update();
    if (isAll || changed.has("log")) this.showLog();
    if (isAll || changed.has("runs")) this.showRuns();
    if (isAll || changed.has("runs") || changed.has("study")) this.study.update();
    this.showHeader();
    this.showAlerts();
    document.body.dataset.ready = "true";
  }

  private layOut(): void {
    const hasRun = this.run !== "" && !this.store.panels.gone;
    const wanted: Element[] = [this.alerts];
    const place = (...panels: Panel[]): number => wanted.push(...panels.map((panel) => panel.element));
    const focused = document.activeElement?.id;
    if (hasRun) {
      const [first, ...others] = this.curves.panels();
      show(this.controls, this.store.panels.curves ? this.curves.controls(this.axis, (axis) => this.go({ axis }), this.filter, (filter) => this.go({ filter })) : null);
      show(this.machineControls, this.machine.heading());
      wanted.push(this.controls);
      if (this.store.panels.curves) {
        if (this.compare.isComparing) place(this.compare.comparison);
        place(this.findings.panel, ...(first ? [first, this.parts.step] : []), this.parts.history, this.parts.memory, ...others);
        if (this.figures.isShown) place(this.figures.panel);
        place(this.map.panel);
        wanted.push(this.machineControls);
        place(...this.machine.panels());
        if (this.pipeline.isShown) place(this.pipeline.panel);
        place(this.log, this.compare.origin);
      }
    }
    if (!this.run && this.study.isShown) place(this.study.panel);
    if (!this.run || (this.store.panels.runs?.length ?? 0) > 1) place(this.runs);
    const isSame = wanted.length === this.main.children.length && wanted.every((element, at) => this.main.children[at] === element);
    if (!isSame) show(this.main, ...wanted);
    if (focused) document.getElementById(focused)?.focus();
    this.curves.update();
    this.machine.update();
  }

  private showHeader(): void {
    const header = this.run ? this.store.panels.header : undefined;
    if (!header) {
      const rows = this.store.panels.runs;
      const text = this.run && !this.store.panels.gone ? "reading the run" : rows ? `${count(rows.length)} ${rows.length === 1 ? "run" : "runs"}` : "loading";
      show(this.header, h("h1", {}, "Paceline ", h("span", { class: "state" }, `· ${text}`)));
      document.title = "Paceline";
      return;
    }
    document.title = `${header.name} · ${header.state} · Paceline`;
    const pair = (value: string, label: string, isLate = false): HTMLElement =>
      h("div", { class: isLate ? "kv late" : "kv" }, h("b", {}, value), h("span", {}, label));
    const pairs: HTMLElement[] = [];
    const { step, steps } = header;
    if (step !== undefined && steps) pairs.push(pair(`${count(step)} / ${count(steps)}`, `step · ${percent(step / steps)}`));
    if (typeof header.left_s === "number") pairs.push(pair(clock(header.left_s), "to the end"));
    if (header.plan) pairs.push(pair(`${header.plan} · ${count(header.ranks)} ${header.ranks === 1 ? "rank" : "ranks"}`, `${header.device} · ${header.precision} · batch ${count(header.batch)}`));
    if (typeof header.samples_per_s === "number") pairs.push(pair(short(header.samples_per_s), "samples/s"));
    if (typeof header.mfu === "number") pairs.push(pair(percent(header.mfu), "MFU"));
    if (typeof header.energy_J === "number") pairs.push(pair(energy(header.energy_J), "energy"));
    if (typeof header.cost === "number") pairs.push(pair(money(header.cost), header.cost_to_end ? `cost · ${money(header.cost + header.cost_to_end)} at the end` : "cost"));
    for (const [name, value] of Object.entries(header.metrics ?? {}).slice(0, 2)) pairs.push(pair(number(value), name.includes("/") ? name : `validation ${name}`));
    if (header.updated) {
      const late = Math.max(0, Date.now() / 1000 - this.store.clockAhead - header.updated);
      const isLate = header.state === "running" && late > 60;
      pairs.push(pair(header.state === "running" ? age(late) : date(header.updated), header.state === "running" ? "data" : "last data", isLate));
    }
    const others = (this.store.panels.runs?.length ?? 0) > 1;
    show(
      this.header,
      h("h1", { title: header.sentence }, header.name, " ", h("span", { class: `state ${header.state}` }, `· ${header.state}`)),
      ...pairs,
      others ? h("nav", {}, h("a", { href: "#" }, "all runs")) : null,
    );
  }

  private showAlerts(): void {
    const { problems = [], gone, header, runs_problem: why } = this.store.panels;
    const lines: string[] = [];
    if (!this.isConnected) lines.push("No connection to paceline watch; the page tries again. If it ended, start it and open the new address.");
    if (this.run && gone) lines.push("This run is not known: its folder was deleted, or paceline watch was started again. Press r for the list of runs.");
    if (!this.run && why) lines.push(why);
    if (this.run && header && !["running", "done", "not started"].includes(header.state)) lines.push(header.sentence);
    if (this.run && !gone) lines.push(...problems);
    const key = lines.join("\n");
    if (this.alerts.dataset.key === key) return;
    this.alerts.dataset.key = key;
    show(this.alerts, ...lines.map((line) => h("p", { class: "problem" }, line)));
  }

  private cell(column: string, at: number): string {
    return String(this.store.tables.log?.[column]?.[at] ?? "");
  }

  private showLog(): void {
    const times = this.store.tables.log?.time ?? [];
    if (!times.length) {
      this.log.fill(h("p", { class: "empty" }, "Starts, saves, notes and failures appear here."));
      return;
    }
    this.log.describe(`${count(times.length)} events, the last first`);
    const rows = times.map((time, at) =>
      h("tr", { class: this.cell("kind", at) }, h("td", { class: "time" }, date(Number(time))), h("td", { class: "text" }, this.cell("text", at))),
    );
    this.log.fill(h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Log" }, h("table", {}, h("tbody", {}, ...rows.reverse()))));
  }

  private runTable(): { columns: string[]; rows: (string | number | null)[][] } {
    return {
      columns: ["run", "state", "step", "of", "loss", "samples/s", "plan"],
      rows: (this.store.panels.runs ?? []).map((row) => [row.name, row.state, row.step ?? null, row.steps ?? null, row.loss ?? null, row.samples_per_s ?? null, row.plan ?? ""]),
    };
  }

  private showRuns(): void {
    const rows = this.store.panels.runs ?? [];
    if (!rows.length) {
      this.runs.fill(h("p", { class: "empty" }, this.store.panels.runs_problem ?? "No runs."));
      return;
    }
    const cell = (row: RunRow): HTMLTableRowElement =>
      h(
        "tr",
        {},
        h("td", { class: "tick" }, this.checkbox(row)),
        h("td", { class: "text" }, h("a", { href: `#run=${row.id}`, "aria-current": row.id === this.run ? "page" : undefined }, row.name)),
        h("td", { class: row.state, title: row.problem || row.sentence || "" }, row.state),
        h("td", { class: "n" }, row.steps ? `${count(row.step)} / ${count(row.steps)}` : ""),
        h("td", { class: "n" }, row.loss === undefined ? "" : number(row.loss)),
        h("td", { class: "n wide" }, row.samples_per_s === undefined ? "" : short(row.samples_per_s)),
        h("td", { class: "text wide" }, row.problem || row.plan || ""),
      );
    const heads = [this.run ? "compare" : "", "run", "state", "step", "loss", "samples/s", "plan"];
    const classes = ["tick", "", "", "n", "n", "n wide", "wide"];
    this.runs.describe("running ones, then the last written first");
    this.runs.fill(
      h(
        "div",
        { class: "scroll" },
        h("table", {}, h("thead", {}, h("tr", {}, ...heads.map((name, at) => h("th", { scope: "col", class: classes[at]! }, name)))), h("tbody", {}, ...rows.map(cell))),
      ),
    );
    this.runs.element.title = HELP;
  }

  /** A box that adds a run to the curves of the run that is shown. */
  private checkbox(row: RunRow): HTMLInputElement | null {
    if (!this.run || row.id === this.run) return null;
    const isOn = this.others.includes(row.id);
    const others = isOn ? this.others.filter((id) => id !== row.id) : [...this.others, row.id];
    return h("input", { type: "checkbox", checked: isOn, "aria-label": `Compare with ${row.name}`, change: () => this.go({ with: others.join(",") }) });
  }

  private press(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) return;
    const rows = this.store.panels.runs ?? [];
    const move = (by: number): void => {
      const at = rows.findIndex((row) => row.id === this.run);
      const next = rows[Math.min(rows.length - 1, Math.max(0, at + by))];
      if (next) location.hash = `run=${next.id}`;
    };
    const axes = this.store.panels.curves?.axes ?? ["step"];
    const actions: Record<string, () => void> = {
      r: () => (location.hash = "#"),
      j: () => move(1),
      k: () => move(-1),
      a: () => this.go({ axis: axes[(axes.indexOf(this.axis) + 1) % axes.length] ?? "step" }),
      l: () => (this.curves.toggleLog(), this.layOut()),
      Escape: () => this.curves.zoom(null),
      "/": () => document.getElementById("filter")?.focus(),
    };
    const action = actions[event.key];
    if (action && !document.querySelector("dialog[open]")) {
      event.preventDefault();
      action();
    }
  }
}

new Page().start();
