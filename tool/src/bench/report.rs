//! Measurements as a table, comma-separated values or JSON. Every format shows whether a device is
//! simulated.

use std::fmt;

use ggml_rust_npu::backend::{Device, Limit};
use ggml_rust_npu::config::settings::Setting;
use serde::Serialize;

use super::cpu::Time;
use super::multiply::MeasuredCost;
use crate::ToolError;
use crate::quantize::Format;
use crate::text::{Column, escaped, table};

/// The whole report.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    /// Version of this tool.
    pub version: &'static str,
    /// The measured devices.
    pub devices: Vec<DeviceLine>,
    /// The points.
    pub rows: Vec<BenchRow>,
    /// M at which devices become faster than the CPU.
    pub crossovers: Vec<Crossover>,
    /// Sizes that were left out, and messages of the backend.
    pub notes: Vec<String>,
}

/// A device.
#[derive(Debug, Serialize)]
pub struct DeviceLine {
    /// Name in ggml.
    pub name: String,
    /// Chip and library.
    pub description: String,
    /// The chip's name.
    pub chip: &'static str,
    /// `true` if times are those of the stand-in.
    pub simulated: bool,
}

/// A point: `dst[M,N] = act[M,K] · w[K,N]`.
#[derive(Clone, Debug, Serialize)]
pub struct BenchRow {
    /// Name of the device.
    pub device: String,
    /// `true` if the time is the stand-in's.
    pub simulated: bool,
    /// Type of the weights in the model's file.
    pub r#type: &'static str,
    /// Rows of activations.
    pub m: usize,
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// Least time.
    pub microseconds: f64,
    /// Bytes of packed weights over the time; `None` if the device does not pack them.
    pub gb_per_s: Option<f64>,
    /// Multiplications and additions over the time.
    pub gops: f64,
    /// Share of the chip's best possible time, if that is known.
    pub share: Option<f64>,
    /// Limit of the chip, if that is known: `memory` or `arithmetic`.
    pub bound: Option<&'static str>,
    /// Time of the CPU, if it was measured.
    pub cpu_microseconds: Option<f64>,
    /// Mean power, if it was measured.
    pub watts: Option<f64>,
    /// Energy for each row of activations, if power was measured.
    pub millijoules_per_row: Option<f64>,
}

/// M at which a device becomes faster than the CPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Crossover {
    /// Name of the device.
    pub device: String,
    /// `true` if its times are the stand-in's.
    pub simulated: bool,
    /// The fewest rows that it should multiply.
    pub min_m: usize,
    /// Largest number of rows that was measured on both sides.
    pub measured_up_to: usize,
}

impl BenchRow {
    /// A point that was measured.
    pub fn new(
        device: &dyn Device,
        format: Format,
        [m, k, n]: [usize; 3],
        cost: MeasuredCost,
        limit: Option<Limit>,
        cpu: Option<&Time>,
    ) -> Self {
        // No real time is shorter than the clock's resolution, so the minimum only avoids a
        // division by 0.
        let ns = cost.time.as_secs_f64().max(1e-9) * 1e9;
        let ops = 2.0 * m as f64 * k as f64 * n as f64;
        let bound = |limit: Limit| {
            let is_memory = limit.memory_ns() >= limit.least_ns(ops);
            if is_memory { "memory" } else { "arithmetic" }
        };
        Self {
            device: device.name().into(),
            simulated: device.is_simulated(),
            r#type: format.dtype().name(),
            m,
            k,
            n,
            microseconds: ns / 1e3,
            gb_per_s: limit.map(|limit| limit.weight_bytes as f64 / ns),
            gops: ops / ns,
            share: limit.map(|limit| limit.least_ns(ops) / ns),
            bound: limit.map(bound),
            cpu_microseconds: cpu.map(|time| time.microseconds),
            watts: cost.energy.map(|energy| energy.watts),
            millijoules_per_row: cost.energy.map(|energy| energy.joules * 1e3 / m as f64),
        }
    }

    /// The cells of [`COLUMNS`].
    fn cells(&self) -> Vec<String> {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        vec![
            self.r#type.into(),
            self.m.to_string(),
            self.k.to_string(),
            self.n.to_string(),
            format!("{:.1}", self.microseconds),
            or_none(self.gb_per_s.map(|rate| format!("{rate:.2}"))),
            format!("{:.1}", self.gops),
            or_none(self.share.map(|share| format!("{:.1} %", share * 100.0))),
            or_none(self.bound.map(String::from)),
            or_none(self.cpu_microseconds.map(|time| format!("{time:.1}"))),
            or_none(self.watts.map(|watts| format!("{watts:.2}"))),
            or_none(
                self.millijoules_per_row
                    .map(|energy| format!("{energy:.3}")),
            ),
        ]
    }
}

impl Crossover {
    /// Derives the crossover from the points of one device; `None` if none of them was measured on
    /// the CPU as well.
    ///
    /// A number of rows is faster on the device if the sum of all its points is. Between two
    /// measured numbers of rows, only the smaller one is assumed to be slower than on the CPU.
    pub fn of(rows: &[&BenchRow]) -> Option<Self> {
        let mut sums: Vec<(usize, f64, f64)> = Vec::new();
        for row in rows {
            let Some(cpu) = row.cpu_microseconds else {
                continue;
            };
            match sums.iter_mut().find(|(m, ..)| *m == row.m) {
                Some((_, npu, of_cpu)) => {
                    (*npu, *of_cpu) = (*npu + row.microseconds, *of_cpu + cpu)
                }
                None => sums.push((row.m, row.microseconds, cpu)),
            }
        }
        sums.sort_by_key(|(m, ..)| *m);
        let slower = sums.iter().rev().find(|(_, npu, cpu)| npu >= cpu);
        Some(Self {
            device: rows.first()?.device.clone(),
            simulated: rows.first()?.simulated,
            min_m: slower.map_or(1, |(m, ..)| m + 1),
            measured_up_to: sums.last()?.0,
        })
    }

    /// Returns the value of the setting and of the variable, which accept no more rows than a
    /// ubatch can have.
    pub fn setting(&self) -> usize {
        self.min_m.min(Setting::MOST_ROWS)
    }
}

/// Columns of the table.
const COLUMNS: [Column; 12] = [
    Column::Text("type"),
    Column::Number("M"),
    Column::Number("K"),
    Column::Number("N"),
    Column::Number("us"),
    Column::Number("GB/s"),
    Column::Number("GOPS"),
    Column::Number("share"),
    Column::Text("bound by"),
    Column::Number("CPU us"),
    Column::Number("W"),
    Column::Number("mJ/row"),
];

/// Remark on times that are not a chip's.
pub const SIMULATED: &str =
    "simulated: times of the stand-in on this CPU, which say nothing of the chip";

impl BenchReport {
    /// Formats the points as comma-separated values, with names in the first line.
    ///
    /// # Errors
    /// The writer's words.
    pub fn csv(&self) -> Result<String, ToolError> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        for row in &self.rows {
            writer.serialize(row)?;
        }
        let bytes = writer.into_inner().map_err(|error| error.to_string())?;
        Ok(String::from_utf8(bytes)?)
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for device in &self.devices {
            writeln!(f, "{}: {}", device.name, escaped(&device.description))?;
            if device.simulated {
                writeln!(f, "{SIMULATED}")?;
            }
            let rows = self.rows.iter().filter(|row| row.device == device.name);
            f.write_str(&table(&COLUMNS, rows.map(BenchRow::cells)))?;
            for found in self
                .crossovers
                .iter()
                .filter(|found| found.device == device.name)
            {
                let Crossover {
                    min_m,
                    measured_up_to,
                    ..
                } = found;
                let simulated = if device.simulated { " (simulated)" } else { "" };
                let what = match min_m {
                    1 => format!(
                        "faster than the CPU with any number of rows up to {measured_up_to}"
                    ),
                    m if m > measured_up_to => {
                        format!("the CPU is faster up to {measured_up_to} rows")
                    }
                    m => format!("faster than the CPU from {m} rows on"),
                };
                writeln!(
                    f,
                    "{}{simulated}: {what}; GGML_RUST_NPU_MIN_M={}",
                    found.device,
                    found.setting()
                )?;
            }
        }
        for note in &self.notes {
            writeln!(f, "- {}", escaped(note))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ggml_rust_npu::config::settings::Settings;

    use super::*;

    fn row(m: usize, npu: f64, cpu: Option<f64>) -> BenchRow {
        BenchRow {
            device: "RKNPU0".into(),
            simulated: true,
            r#type: "Q8_0",
            m,
            k: 64,
            n: 32,
            microseconds: npu,
            gb_per_s: Some(1.0),
            gops: 2.0,
            share: Some(0.25),
            bound: Some("memory"),
            cpu_microseconds: cpu,
            watts: None,
            millijoules_per_row: None,
        }
    }

    fn min_m(rows: &[BenchRow]) -> Option<usize> {
        let rows: Vec<&BenchRow> = rows.iter().collect();
        Crossover::of(&rows).map(|found| found.min_m)
    }

    #[test]
    fn the_npu_takes_over_where_it_is_faster_from_then_on() {
        let cpu = Some(10.0);
        assert_eq!(min_m(&[row(1, 5.0, cpu), row(2, 5.0, cpu)]), Some(1));
        assert_eq!(
            min_m(&[row(4, 5.0, cpu), row(1, 20.0, cpu), row(2, 15.0, cpu)]),
            Some(3)
        );
        // The NPU is faster once and then slower again, so the crossover comes after the last
        // slower one.
        assert_eq!(
            min_m(&[row(1, 5.0, cpu), row(2, 15.0, cpu), row(4, 5.0, cpu)]),
            Some(3)
        );
        assert_eq!(min_m(&[row(1, 20.0, cpu), row(512, 20.0, cpu)]), Some(513));
        // All points of the same M are judged together.
        assert_eq!(min_m(&[row(1, 15.0, cpu), row(1, 4.0, cpu)]), Some(1));
        assert_eq!(min_m(&[row(1, 15.0, None)]), None);
    }

    #[test]
    fn a_cpu_that_is_always_faster_gives_a_setting_that_is_accepted() {
        let cpu = Some(10.0);
        let rows = [row(1, 20.0, cpu), row(65536, 20.0, cpu)];
        let found = Crossover::of(&rows.iter().collect::<Vec<_>>()).unwrap();
        let text = Settings::with("", Setting::MinM, "rk3588", false, found.setting());
        let settings = Settings::parse(&text).unwrap();
        assert_eq!(settings.get(Setting::MinM, "rk3588", false), Some(65536));
        let report = BenchReport {
            version: "1",
            devices: vec![DeviceLine {
                name: "RKNPU0".into(),
                description: String::new(),
                chip: "rk3588",
                simulated: false,
            }],
            rows: rows.into(),
            crossovers: vec![found],
            notes: Vec::new(),
        };
        let line = "the CPU is faster up to 65536 rows; GGML_RUST_NPU_MIN_M=65536\n";
        assert!(report.to_string().contains(line), "{report}");
    }

    #[test]
    fn every_line_of_the_values_says_that_it_is_simulated() {
        let report = BenchReport {
            version: "1",
            devices: Vec::new(),
            rows: vec![row(1, 5.0, None), row(2, 5.0, Some(7.0))],
            crossovers: Vec::new(),
            notes: Vec::new(),
        };
        let csv = report.csv().unwrap();
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(
            lines,
            [
                "device,simulated,type,m,k,n,microseconds,gb_per_s,gops,share,bound,cpu_microseconds,watts,millijoules_per_row",
                "RKNPU0,true,Q8_0,1,64,32,5.0,1.0,2.0,0.25,memory,,,",
                "RKNPU0,true,Q8_0,2,64,32,5.0,1.0,2.0,0.25,memory,7.0,,",
            ]
        );
    }
}
