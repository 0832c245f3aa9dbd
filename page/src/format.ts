// Numbers as text, with their units.

export type Value = number | null | undefined;
export const NONE = "–";

export function count(value: Value): string {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function number(value: Value, digits = 4): string {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.min(2, digits - 1));
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: digits });
}

function scaled(value: Value, base: number, units: string[], digits = 3): string {
  if (value === null || value === undefined) return NONE;
  let at = 0;
  let left = value;
  while (Math.abs(left) >= base && at < units.length - 1) {
    left /= base;
    at += 1;
  }
  return `${number(left, digits)} ${units[at]}`.trim();
}

export const bytes = (value: Value): string => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
export const short = (value: Value): string => scaled(value, 1000, ["", "k", "M", "G", "T"]);

export function energy(joules: Value): string {
  if (joules === null || joules === undefined) return NONE;
  return joules < 3600 ? `${number(joules, 3)} J` : scaled(joules / 3600, 1000, ["Wh", "kWh", "MWh", "GWh"]);
}

/** A short time with a unit, a long one as h:mm:ss. */
export function seconds(value: Value): string {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${number(value * 1e6, 3)} µs`;
  if (size < 1) return `${number(value * 1e3, 3)} ms`;
  return size < 60 ? `${number(value, 3)} s` : clock(value);
}

export function clock(value: number): string {
  const whole = Math.round(value);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const pad = (part: number): string => String(part).padStart(2, "0");
  return hours >= 24 ? `${Math.floor(hours / 24)} d ${hours % 24}:${pad(minutes)} h` : `${hours}:${pad(minutes)}:${pad(rest)}`;
}

export function age(value: number): string {
  if (value < 0.95) return "now";
  return value < 60 ? `${Math.round(value)} s ago` : `${clock(value)} ago`;
}

/** An amount in a currency that nobody named. */
export const money = (value: number): string => (value < 1000 ? value.toFixed(2) : scaled(value, 1000, ["", "k", "M", "G"]));

export const percent = (value: number): string => `${number(100 * value, 2)} %`;

export function date(time: number): string {
  const at = new Date(time * 1000);
  const pad = (part: number): string => String(part).padStart(2, "0");
  return (
    `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ` +
    `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`
  );
}

export const AXES: Record<string, { name: string; text: (value: number) => string }> = {
  step: { name: "step", text: count },
  samples: { name: "samples", text: short },
  time: { name: "time of training", text: (value) => (value === 0 ? "0" : seconds(value)) },
  energy: { name: "energy", text: energy },
};

const UNITS: Record<string, (value: Value) => string> = { step_s: seconds, data_s: seconds, samples_per_s: short };
const TITLES: Record<string, string> = {
  loss: "Loss",
  grad_norm: "Gradient norm",
  lr: "Learning rate",
  samples_per_s: "Throughput",
  step_s: "Step time",
  data_s: "Waiting for the batch",
};

/** Title, unit and format of a curve by its key, which is "step:NAME" or "metric:NAME". */
export function describe(key: string): { title: string; unit: string; text: (value: Value) => string } {
  const at = key.indexOf(":");
  const [kind, name] = [key.slice(0, at), key.slice(at + 1)];
  if (kind === "metric") {
    return { title: name.includes("/") ? name : `validation ${name}`, unit: "evaluations", text: (value) => number(value) };
  }
  const unit = name === "samples_per_s" ? "samples/s" : name.endsWith("_s") ? "seconds" : "";
  return { title: TITLES[name] ?? name, unit, text: UNITS[name] ?? ((value) => number(value)) };
}
