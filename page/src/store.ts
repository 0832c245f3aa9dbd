// What the server has sent: panels, which it replaces, and tables, of which it sends changed rows.

export type Cell = number | string | null;
export type Table = Record<string, Cell[]>;

export interface RunRow {
  id: string;
  name: string;
  state: string;
  problem: string;
  sentence?: string;
  step?: number;
  steps?: number | null;
  plan?: string;
  loss?: number | null;
  samples_per_s?: number | null;
}

export interface Header {
  name: string;
  state: string;
  sentence: string;
  updated: number | null;
  starts: number;
  task?: string;
  step?: number;
  steps?: number;
  left_s?: number | null;
  plan?: string;
  ranks?: number;
  device?: string;
  precision?: string;
  batch?: number;
  parameters?: number;
  samples_per_s?: number | null;
  step_s?: number | null;
  energy_J?: number | null;
  mfu?: number | null;
  cost?: number | null;
  cost_to_end?: number | null;
  metrics?: Record<string, number | null>;
}

export interface Mark {
  kind: "save" | "failure" | "stall" | "restart";
  step: number;
  x: number;
  text: string;
}

export interface Curves {
  axis: string;
  axes: string[];
  names: string[];
  count: number;
  marks: Mark[];
}

/** Name, measured, predicted, standard deviation of the prediction. */
export type PartRow = [string, number, number | null, number | null];

export interface Parts {
  colours: Record<string, string>;
  memory_colours: Record<string, string>;
  problem?: string;
  unpredicted?: string;
  step_s?: number;
  time?: PartRow[];
  memory?: PartRow[];
  peak_rank?: number;
  straggler?: number | null;
  straggler_busy_s?: number;
  mean_busy_s?: number;
}

export interface Finding {
  rule: string;
  sentence: string;
  evidence: Record<string, number | null>;
  cost_share: number | null;
  lost_s: number | null;
  to_end_s: number | null;
  fix: string;
  simulated: boolean;
}

export interface Findings {
  findings: Finding[];
  checked: string[];
  not_checked: Record<string, string>;
  problem?: string;
}

/** Stage, kind (forward, backward, weight gradients), micro-batch, begin and end in microseconds. */
export type Action = [number, number, number, number, number];

export interface Pipeline {
  problem?: string;
  step?: number;
  stages?: number[];
  actions?: Action[];
  ideal?: Action[];
  bubble?: number;
  ideal_bubble?: number | null;
  span_us?: number;
}

/** id: of its address. steps: of its images, in their order. */
export interface Figure {
  id: string;
  name: string;
  steps: number[];
}

export interface Machine {
  nodes: string[];
  node: number;
  figures: { title: string; unit: string }[];
  absent?: string[];
}

export interface MapRow {
  node: string;
  rank?: number;
  gpu?: number;
  pp?: number;
  dp?: number;
  cp?: number;
  tp?: number;
}

export interface RankMap {
  titles: string[];
  rows: MapRow[];
  title?: string;
  unit?: string;
  what?: "rank" | "gpu";
  width_s?: number;
  problem?: string;
}

export interface Origin {
  origin: [string, string | number | boolean | null][];
  request: [string, string | number | boolean | null][];
  problem: string;
}

export interface Comparison {
  runs: (Header & { problem?: string })[];
  differences: [string, ...(string | number | boolean | null)[]][];
}

/** Number, whether it is on the Pareto front, state, results, values, seconds, message. */
export type TrialRow = [number, boolean, string, (number | null)[], string[], number, string];

/** curve: results of complete trials in their order. problem: why there is nothing else. */
export interface Study {
  problem?: string;
  name: string;
  counts: string;
  planned: number;
  goals: string[];
  search: string;
  parameters: string[];
  rows?: TrialRow[];
  curve: { trial: number[]; value: number[]; best: number[] };
}

export interface Panels {
  study?: Study | null;
  pipeline?: Pipeline | null;
  figures?: { figures: Figure[] } | null;
  origin?: Origin;
  comparison?: Comparison;
  machine?: Machine;
  map?: RankMap;
  findings?: Findings | null;
  runs?: RunRow[];
  runs_problem?: string;
  gone?: boolean;
  header?: Header;
  curves?: Curves;
  parts?: Parts;
  problems?: string[];
}

interface Update {
  drop: number;
  keep: number;
  columns: Table;
}

export interface Message {
  now: number;
  panels?: Panels;
  tables?: Record<string, Update>;
  removed?: string[];
  /** order: identifiers of new rows, and first and count of neighbours in the old order. */
  lists?: { runs?: { order?: (string | [number, number])[]; rows?: RunRow[] } };
}

export class Store {
  panels: Panels = {};
  tables: Record<string, Table> = {};
  clockAhead = 0; // seconds that the clock of this machine is ahead of the server's

  /** Take a message; return the names of the panels and tables that changed. */
  apply(message: Message): Set<string> {
    this.clockAhead = Date.now() / 1000 - message.now;
    const changed = new Set<string>(Object.keys(message.panels ?? {}));
    Object.assign(this.panels, message.panels);
    for (const [name, update] of Object.entries(message.tables ?? {})) {
      const before = this.tables[name] ?? {};
      const after: Table = {};
      for (const [column, values] of Object.entries(update.columns)) {
        after[column] = (before[column] ?? []).slice(update.drop, update.drop + update.keep).concat(values);
      }
      this.tables[name] = after;
      changed.add(name);
    }
    const runs = message.lists?.runs;
    if (runs) {
      const known = new Map((this.panels.runs ?? []).map((row) => [row.id, row]));
      const old = [...known.keys()];
      const order = runs.order?.flatMap((part) => (typeof part === "string" ? part : old.slice(part[0], part[0] + part[1]))) ?? old;
      for (const row of runs.rows ?? []) known.set(row.id, row);
      this.panels.runs = order.map((id) => known.get(id)).filter((row) => row !== undefined);
      changed.add("runs");
    }
    for (const name of message.removed ?? []) {
      delete this.tables[name];
      changed.add(name);
    }
    return changed;
  }

  clear(): void {
    const { runs, study } = this.panels;
    this.panels = { ...(runs ? { runs } : {}), ...(study ? { study } : {}) };
    this.tables = {};
  }
}
