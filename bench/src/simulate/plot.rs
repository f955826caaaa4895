//! The table as a picture: how many times as long as with `ttft` first tokens take, per policy and cell.

use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;
use shards::service::Blend;

use super::policy::Kind;
use super::report::Cell;

const SIZE: (u32, u32) = (1_200, 520);
/// What is slower than this stands at the edge.
const RATIO_MOST: f64 = 100.0;
const SHOWN: [(Kind, RGBColor); 6] = [
    (Kind::RoundRobin, RGBColor(150, 150, 150)),
    (Kind::SessionHash, RGBColor(214, 120, 40)),
    (Kind::LongestMatch, RGBColor(190, 60, 60)),
    (Kind::Tree, RGBColor(120, 80, 170)),
    (Kind::Blend(Blend::Hard), RGBColor(60, 120, 200)),
    (Kind::Oracle, RGBColor(40, 150, 90)),
];

/// Draws the cells from left to right, as an SVG.
///
/// # Errors
/// A file that cannot be written.
pub fn draw(cells: &[Cell], path: &Path) -> anyhow::Result<()> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("the plot {} cannot be drawn: {error}", path.display());
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Mean time to first token, over that of ttft (logarithmic)", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..cells.len() as f64, (0.3..RATIO_MOST).log_scale())
        .map_err(|error| failed(&error))?;
    let label = |x: &f64| {
        let cell = cells.get(*x as usize);
        cell.map_or(String::new(), |cell| {
            format!("{} {}w {:.0}%", first_word(&cell.trace), cell.workers, cell.load * 100.0)
        })
    };
    chart
        .configure_mesh()
        .x_labels(cells.len().clamp(1, 12))
        .x_label_formatter(&label)
        .y_desc("times as long as ttft")
        .draw()
        .map_err(|error| failed(&error))?;
    for (kind, colour) in SHOWN {
        let points = cells.iter().enumerate().filter_map(|(place, cell)| {
            let (own, other) = (cell.row(Kind::Blend(Blend::Ttft))?, cell.row(kind)?);
            Some((place as f64 + 0.5, (other.mean / own.mean).clamp(0.3, RATIO_MOST)))
        });
        chart
            .draw_series(points.map(|point| Circle::new(point, 4, colour.filled())))
            .map_err(|error| failed(&error))?
            .label(kind.name())
            .legend(move |(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
    }
    let level = LineSeries::new([(0.0, 1.0), (cells.len() as f64, 1.0)], BLACK);
    chart.draw_series(level).map_err(|error| failed(&error))?;
    let labels = chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw();
    labels.map_err(|error| failed(&error))?;
    root.present().map_err(|error| failed(&error))
}

fn first_word(name: &str) -> &str {
    name.split('_').next().unwrap_or(name)
}
