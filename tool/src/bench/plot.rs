//! The picture, as an SVG: operations in a nanosecond over M, a line for each type and size of
//! weights, and crosses for the CPU. Both axes are logarithmic.

use std::path::Path;

use super::report::{BenchReport, BenchRow};
use crate::svg::{self, Axis, COLORS, GRID, NAME_HEIGHT, PLOT, number, path, text};
use crate::{ToolError, files};

/// Points of one type and size of weights: M, and operations in a nanosecond.
struct PlotLine {
    name: String,
    npu: Vec<[f64; 2]>,
    cpu: Vec<[f64; 2]>,
}

/// Draws a panel for each device, one below the other.
///
/// # Errors
/// Text that names the file.
pub fn draw(path: &Path, report: &BenchReport) -> Result<(), ToolError> {
    let panels = report.devices.iter().map(|device| {
        let rows = report.rows.iter().filter(|row| row.device == device.name);
        panel(&device.description, &lines(rows))
    });
    files::write(path, svg::document(panels).as_bytes())
}

fn lines<'a>(rows: impl Iterator<Item = &'a BenchRow>) -> Vec<PlotLine> {
    let mut lines: Vec<PlotLine> = Vec::new();
    for row in rows {
        let name = format!("{} {}x{}", row.r#type, row.k, row.n);
        let index = lines
            .iter()
            .position(|line| line.name == name)
            .unwrap_or_else(|| {
                let (npu, cpu) = (Vec::new(), Vec::new());
                lines.push(PlotLine { name, npu, cpu });
                lines.len() - 1
            });
        let m = row.m as f64;
        lines[index].npu.push([m, row.gops]);
        if let Some(time) = row.cpu_microseconds {
            let gops = row.gops * row.microseconds / time;
            lines[index].cpu.push([m, gops]);
        }
    }
    lines
}

fn panel(title: &str, lines: &[PlotLine]) -> String {
    let points = (lines.iter()).flat_map(|line| line.npu.iter().chain(&line.cpu));
    let [across, down] = PLOT;
    // In the picture, y grows downwards.
    let x = Axis::new(points.clone().map(|point| point[0]), across.clone());
    let y = Axis::new(points.map(|point| point[1]), down.end..down.start);
    let place = |[m, gops]: &[f64; 2]| [x.place(*m), y.place(*gops)];
    let (left, right, top, bottom) = (across.start, across.end, down.start, down.end);

    let mut out = text([left, top - 26.0], "start", title);
    for mark in x.marks() {
        let at = x.place(mark);
        out += &path(&format!("M{at:.1} {top}V{bottom}"), GRID);
        out += &text([at, bottom + 18.0], "middle", &number(mark));
    }
    for mark in y.marks() {
        let at = y.place(mark);
        out += &path(&format!("M{left} {at:.1}H{right}"), GRID);
        out += &text([left - 8.0, at + 4.0], "end", &number(mark));
    }
    out += &path(&format!("M{left} {top}V{bottom}H{right}"), "black");
    let middle = (left + right) / 2.0;
    out += &text([middle, bottom + 40.0], "middle", "M: rows of activations");
    out += &text([left, top - 8.0], "start", "GOPS (crosses: CPU)");

    for (index, line) in lines.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points = line.npu.iter().map(place);
        let points: Vec<String> = points.map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        out += &format!("<polyline points=\"{points}\" stroke=\"{color}\" fill=\"none\"/>\n");
        for [x, y] in line.cpu.iter().map(place) {
            out += &path(&format!("M{x:.1} {y:.1}m-4-4l8 8m-8 0l8-8"), color);
        }
        let (x, y) = (right + 15.0, top + 10.0 + NAME_HEIGHT * index as f64);
        out += &path(&format!("M{x} {y}h20"), color);
        out += &text([x + 28.0, y + 4.0], "start", &line.name);
    }
    out
}
