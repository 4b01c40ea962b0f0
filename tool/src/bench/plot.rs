//! The picture: operations in a nanosecond over M, a line for each type and size of weights, and
//! crosses for the CPU.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::register_font;

use super::report::{BenchReport, BenchRow};
use crate::{ToolError, files};

/// Pixels of a device's panel.
const PANEL: (u32, u32) = (1000, 500);
/// Red, green and blue.
const BYTES_PER_PIXEL: usize = 3;
/// Name that the font is known by to the library that draws.
const FONT: &str = "sans-serif";

/// Points of one type and size of weights: M, and operations in a nanosecond.
struct PlotLine {
    name: String,
    npu: Vec<(f64, f64)>,
    cpu: Vec<(f64, f64)>,
}

/// Draws a panel for each device, one below the other.
///
/// # Errors
/// Text that names the file.
pub fn draw(path: &Path, report: &BenchReport) -> Result<(), ToolError> {
    let font = epaint_default_fonts::HACK_REGULAR;
    register_font(FONT, FontStyle::Normal, font).map_err(|_| "the font cannot be read")?;
    let count = report.devices.len();
    // CAST: there are few devices.
    let (width, height) = (PANEL.0, PANEL.1 * u32::try_from(count)?);
    let mut pixels = vec![0; width as usize * height as usize * BYTES_PER_PIXEL];
    {
        let area = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        area.fill(&WHITE)?;
        for (device, panel) in report.devices.iter().zip(area.split_evenly((count, 1))) {
            let rows = report.rows.iter().filter(|row| row.device == device.name);
            draw_panel(&panel, &device.description, &lines(rows))
                .map_err(|error| error.to_string())?;
        }
        area.present()?;
    }
    let mut picture = Vec::new();
    let mut encoder = png::Encoder::new(&mut picture, width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    writer.finish()?;
    files::write(path, &picture)
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
        lines[index].npu.push((m, row.gops));
        if let Some(time) = row.cpu_microseconds {
            lines[index]
                .cpu
                .push((m, row.gops * row.microseconds / time));
        }
    }
    lines
}

type PlotPanel<'a> = DrawingArea<BitMapBackend<'a>, plotters::coord::Shift>;
type DrawingFailure<'a> = DrawingAreaErrorKind<<BitMapBackend<'a> as DrawingBackend>::ErrorType>;

fn draw_panel<'a>(
    panel: &PlotPanel<'a>,
    title: &str,
    lines: &[PlotLine],
) -> Result<(), DrawingFailure<'a>> {
    let points = || {
        lines
            .iter()
            .flat_map(|line| line.npu.iter().chain(&line.cpu))
    };
    let ends = |of: fn(&(f64, f64)) -> f64, room: f64| {
        let low = points().map(of).fold(f64::INFINITY, f64::min);
        let high = points().map(of).fold(0.0, f64::max);
        // An axis even without points.
        let (low, high) = if high > 0.0 { (low, high) } else { (1.0, 10.0) };
        low * 0.8..high * room
    };
    // The lines' names are to the right of them.
    let (m, gops) = (ends(|point| point.0, 4.0), ends(|point| point.1, 1.25));
    let mut chart = ChartBuilder::on(panel)
        .caption(title, (FONT, 16))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(m.log_scale(), gops.log_scale())?;
    (chart.configure_mesh())
        .label_style((FONT, 12))
        .x_desc("M: rows of activations")
        .y_desc("GOPS (crosses: CPU)")
        .draw()?;
    for (index, line) in lines.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        chart
            .draw_series(LineSeries::new(
                line.npu.iter().copied(),
                color.stroke_width(2),
            ))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
        chart.draw_series(
            line.cpu
                .iter()
                .map(|point| Cross::new(*point, 5, color.stroke_width(2))),
        )?;
    }
    (chart.configure_series_labels())
        .position(SeriesLabelPosition::MiddleRight)
        .label_font((FONT, 12))
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
}
