//! Plots as SVG, drawn here in a few hundred lines. Browsers lay the text out with their own fonts and the page's colours; a
//! plotting crate measures fonts itself.

use std::fmt::Write;

use super::experiment::{Axis, Plot, Point, Scale, short};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 52.0;

/// Colours of series, that people with any kind of colour vision tell apart (Okabe and Ito's); the page names them. Markers
/// and dashes differ too.
pub(super) const COLOURS: usize = 8;

/// Draws a plot; what is inside goes by the classes of the page's style.
pub(super) fn svg(plot: &Plot) -> String {
    let mut out = String::new();
    let title = escape(&plot.title);
    // Writing to a string cannot fail.
    let _ =
        write!(out, r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"><title>{title}</title>"#);
    let points = || plot.series.iter().flat_map(|series| &series.points);
    let x = Ruler::new(&plot.x, points().map(|point| point.x), LEFT, WIDTH - RIGHT);
    let highest = points().flat_map(|point| point.rounds.iter().copied().chain([point.median]));
    let wholes = points().filter(|_| is_stacked(plot)).map(|point| foot(plot, plot.series.len(), point.x));
    let y = Ruler::new(&plot.y, highest.chain(wholes), HEIGHT - BOTTOM, TOP);
    axes(&mut out, plot, &x, &y);
    for (index, series) in plot.series.iter().enumerate() {
        let class = index % COLOURS;
        let _ = write!(out, r#"<g class="s{class}">"#);
        if is_stacked(plot) {
            for point in &series.points {
                part(&mut out, point, foot(plot, index, point.x), x.place(point.x), x.step() * 0.4, &y);
            }
        } else if has_bars(plot) {
            let width = x.step() * 0.8 / plot.series.len() as f64;
            let shift = (index as f64 + 0.5) * width - x.step() * 0.4;
            for point in &series.points {
                bar(&mut out, point, x.place(point.x) + shift, width, &y);
            }
        } else {
            line(&mut out, &series.points, index, &x, &y);
        }
        out.push_str("</g>");
    }
    out.push_str("</svg>");
    out.push_str(&legend(plot));
    out
}

fn has_bars(plot: &Plot) -> bool {
    matches!(plot.x.scale, Scale::Names(_) | Scale::Parts(_))
}

fn is_stacked(plot: &Plot) -> bool {
    matches!(plot.x.scale, Scale::Parts(_))
}

/// What the series before this one have together at a place.
fn foot(plot: &Plot, series: usize, x: f64) -> f64 {
    let points = plot.series[..series].iter().flat_map(|series| &series.points);
    points.filter(|point| point.is_at(x)).map(|point| point.median).sum()
}

fn axes(out: &mut String, plot: &Plot, x: &Ruler, y: &Ruler) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for (value, text) in y.ticks() {
        let at = y.place(value);
        let _ = write!(out, r#"<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1}" y2="{at:.1}"/>"#);
        let _ = write!(out, r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{text}</text>"#, LEFT - 6.0, at + 4.0);
    }
    for (value, text) in x.ticks() {
        let (at, below) = (x.place(value), bottom + 18.0);
        let _ = write!(out, r#"<line class="axis" x1="{at:.1}" x2="{at:.1}" y1="{bottom}" y2="{:.1}"/>"#, bottom + 4.0);
        let _ = write!(out, r#"<text x="{at:.1}" y="{below:.1}" text-anchor="middle">{}</text>"#, escape(&text));
    }
    let _ = write!(out, r#"<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}" fill="none"/>"#);
    let (middle, low) = (f64::midpoint(LEFT, right), HEIGHT - 12.0);
    let _ = write!(out, r#"<text x="{middle}" y="{low}" text-anchor="middle">{}</text>"#, name(&plot.x));
    let middle = f64::midpoint(TOP, bottom);
    let turned = format!("rotate(-90 14 {middle})");
    let _ =
        write!(out, r#"<text x="14" y="{middle}" text-anchor="middle" transform="{turned}">{}</text>"#, name(&plot.y));
}

fn name(axis: &Axis) -> String {
    let label = escape(axis.label);
    if axis.unit.is_empty() { label } else { format!("{label} ({})", escape(axis.unit)) }
}

fn line(out: &mut String, points: &[Point], index: usize, x: &Ruler, y: &Ruler) {
    let places: Vec<_> = points.iter().map(|point| (x.place(point.x), y.place(point.median))).collect();
    let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let dashes = dashes(index);
    let _ = write!(out, r#"<polyline fill="none" stroke-dasharray="{dashes}" points="{}"/>"#, path.join(" "));
    for (point, (x, at)) in points.iter().zip(places) {
        spread(out, point, x, y);
        let (tag, shape) = marker(index, x, at);
        let _ = write!(out, "<{tag} {shape}><title>{}</title></{tag}>", short(point.median));
    }
}

/// The element of a series' marker at a place, and its shape.
fn marker(index: usize, x: f64, y: f64) -> (&'static str, String) {
    match index % 4 {
        0 => ("circle", format!(r#"cx="{x:.1}" cy="{y:.1}" r="3.5""#)),
        1 => ("rect", format!(r#"x="{:.1}" y="{:.1}" width="6.4" height="6.4""#, x - 3.2, y - 3.2)),
        2 => ("path", format!(r#"d="M{x:.1} {:.1}l4.2 7.4h-8.4z""#, y - 4.6)),
        _ => ("path", format!(r#"d="M{x:.1} {:.1}l4.4 4.4l-4.4 4.4l-4.4-4.4z""#, y - 4.4)),
    }
}

/// The dashes of a series' line.
fn dashes(index: usize) -> &'static str {
    ["", "6 3", "2 3", "9 3 2 3"][index / COLOURS % 4]
}

fn bar(out: &mut String, point: &Point, middle: f64, width: f64, y: &Ruler) {
    let (top, foot) = (y.place(point.median), HEIGHT - BOTTOM);
    let (left, height) = (middle - width / 2.0, (foot - top).max(0.0));
    let text = short(point.median);
    let _ = write!(out, r#"<rect x="{left:.1}" y="{top:.1}" width="{:.1}" height="{height:.1}">"#, width - 2.0);
    let _ = write!(out, "<title>{text}</title></rect>");
    let _ = write!(out, r#"<text x="{middle:.1}" y="{:.1}" text-anchor="middle">{text}</text>"#, top - 4.0);
    spread(out, point, middle, y);
}

/// A bar that stands on others, with its number beside it.
fn part(out: &mut String, point: &Point, foot: f64, middle: f64, width: f64, y: &Ruler) {
    let (top, bottom) = (y.place(foot + point.median), y.place(foot));
    let (left, height, text) = (middle - width / 2.0, (bottom - top).max(0.0), short(point.median));
    let _ = write!(out, r#"<rect x="{left:.1}" y="{top:.1}" width="{width:.1}" height="{height:.1}">"#);
    let _ = write!(out, "<title>{text}</title></rect>");
    let beside = middle + width / 2.0 + 6.0;
    let _ = write!(out, r#"<text x="{beside:.1}" y="{:.1}">{text}</text>"#, f64::midpoint(top, bottom) + 4.0);
}

/// A thin line from the least of the rounds to the greatest.
fn spread(out: &mut String, point: &Point, x: f64, y: &Ruler) {
    let least = point.rounds.iter().copied().fold(point.median, f64::min);
    let greatest = point.rounds.iter().copied().fold(point.median, f64::max);
    let (from, to) = (y.place(least), y.place(greatest));
    let _ = write!(out, r#"<line class="spread" x1="{x:.1}" x2="{x:.1}" y1="{from:.1}" y2="{to:.1}"/>"#);
}

/// Each series by its name and the sign it is drawn with: a marker on a piece of its line, or a bar's colour.
fn legend(plot: &Plot) -> String {
    let bars = has_bars(plot);
    let entry = |(index, series): (usize, &super::experiment::Series)| {
        let sign = if bars {
            r#"<rect x="6" y="1" width="12" height="10"/>"#.to_owned()
        } else {
            let (tag, shape) = marker(index, 12.0, 6.0);
            let dashes = dashes(index);
            format!(r#"<polyline fill="none" stroke-dasharray="{dashes}" points="0,6 24,6"/><{tag} {shape}/>"#)
        };
        let (class, name) = (index % COLOURS, escape(&series.name));
        format!(
            r#"<span><svg class="sign" viewBox="0 0 24 12" aria-hidden="true"><g class="s{class}">{sign}</g></svg>{name}</span>"#
        )
    };
    let entries: String = plot.series.iter().enumerate().map(entry).collect();
    format!(r#"<p class="legend">{entries}</p>"#)
}

/// From values to places.
struct Ruler {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Ruler {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let scale = axis.scale.clone();
        let (mut low, mut high) =
            values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        let (low, high) = match &scale {
            Scale::Linear => (0.0, nice(high.max(1e-9) * 1.05)),
            Scale::Bytes | Scale::Powers => (low.max(1e-9).log2() - 0.2, high.max(1e-9).log2() + 0.2),
            Scale::Decades => (low.max(1e-9).log10().floor(), high.max(1e-9).log10().ceil()),
            Scale::Names(names) | Scale::Parts(names) => (-0.5, names.len() as f64 - 0.5),
        };
        Self { scale, low, high: if high > low { high } else { low + 1.0 }, from, to }
    }

    fn place(&self, value: f64) -> f64 {
        let value = match self.scale {
            Scale::Linear | Scale::Names(_) | Scale::Parts(_) => value,
            Scale::Bytes | Scale::Powers => value.max(1e-9).log2(),
            Scale::Decades => value.max(1e-9).log10(),
        };
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Between two names.
    fn step(&self) -> f64 {
        (self.to - self.from).abs() / (self.high - self.low)
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        let powers = |base: f64| {
            let (first, last) = (self.low.ceil() as i32, self.high.floor() as i32);
            let every = (((last - first) / 8) + 1).max(1);
            (first..=last).step_by(every as usize).map(move |power| base.powi(power))
        };
        match &self.scale {
            Scale::Linear => {
                let step = self.high / 5.0;
                (0..=5).map(|tick| (step * f64::from(tick), plain(step * f64::from(tick)))).collect()
            }
            Scale::Powers => powers(2.0).map(|value| (value, plain(value))).collect(),
            Scale::Bytes => powers(2.0).map(|value| (value, byway_remote::units::format_size(value as u64))).collect(),
            Scale::Decades => powers(10.0).map(|value| (value, plain(value))).collect(),
            Scale::Names(names) | Scale::Parts(names) => {
                names.iter().enumerate().map(|(at, name)| (at as f64, (*name).to_owned())).collect()
            }
        }
    }
}

/// The next value that five steps divide well.
fn nice(value: f64) -> f64 {
    let decade = 10f64.powf(value.log10().floor());
    let steps = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0];
    steps.iter().map(|step| step * decade).find(|&top| top >= value).unwrap_or(10.0 * decade)
}

/// A number without needless digits.
fn plain(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Text for HTML and SVG.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::experiment::made;
    use super::*;

    #[test]
    fn every_point_is_drawn_inside_the_axes() {
        let mut plot = made::plot("p", &[("a", &[(1024.0, 5.0), (1_048_576.0, 900.0)]), ("b<", &[(4096.0, 0.1)])]);
        for scale in [Scale::Bytes, Scale::Powers, Scale::Linear, Scale::Decades] {
            plot.x.scale = scale.clone();
            plot.y.scale = Scale::Decades;
            let drawn = svg(&plot);
            let (plotted, _) = drawn.split_once("</svg>").unwrap();
            assert_eq!((plotted.matches("<circle").count(), plotted.matches("<rect").count()), (2, 1), "{scale:?}");
            assert!(drawn.contains("b&lt;") && !drawn.contains("b<") && !drawn.contains("NaN"), "{drawn}");
            let rule = Ruler::new(&plot.x, [1024.0, 1_048_576.0].into_iter(), LEFT, WIDTH - RIGHT);
            assert!((LEFT..=WIDTH).contains(&rule.place(1024.0)) && rule.place(1_048_576.0) <= WIDTH - RIGHT);
        }
    }

    #[test]
    fn names_are_bars_and_a_plot_without_data_is_still_one() {
        let mut plot = made::plot("p", &[("a", &[(0.0, 1.0), (1.0, 2.0)])]);
        plot.x.scale = Scale::Names(vec!["one", "two"]);
        let drawn = svg(&plot);
        assert!(drawn.contains(">two<") && drawn.matches("<rect").count() == 2 + 1, "{drawn}");
        plot.series.clear();
        assert!(!svg(&plot).contains("NaN"));
    }

    #[test]
    fn parts_stand_on_each_other_below_the_top_of_the_axis() {
        let mut plot = made::plot("p", &[("a", &[(0.0, 10.0), (1.0, 5.0)]), ("b", &[(0.0, 20.0), (1.0, 15.0)])]);
        plot.x.scale = Scale::Parts(vec!["one", "two"]);
        let drawn = svg(&plot);
        let (plotted, _) = drawn.split_once("</svg>").unwrap();
        let number = |rect: &str, name: &str| -> f64 {
            rect.split_once(&format!(" {name}=\"")).unwrap().1.split('"').next().unwrap().parse().unwrap()
        };
        let rects: Vec<_> = plotted.split("<rect").skip(1).collect();
        let [a, a_two, b, b_two] = rects[..] else { panic!("{plotted}") };
        for (low, high) in [(a, b), (a_two, b_two)] {
            let seam = number(high, "y") + number(high, "height");
            assert!((seam - number(low, "y")).abs() < 0.2, "{drawn}");
            assert!((number(low, "x") - number(high, "x")).abs() < 0.01);
        }
        assert!(number(b, "y") >= TOP && (number(b, "height") - 2.0 * number(a, "height")).abs() < 0.3, "{drawn}");
    }

    #[test]
    fn the_legend_shows_each_series_as_it_is_drawn() {
        let points: &[(f64, f64)] = &[(1024.0, 5.0), (4096.0, 7.0)];
        let names: Vec<String> = (0..=2 * COLOURS).map(|index| format!("series-{index}")).collect();
        let series: Vec<_> = names.iter().map(|name| (name.as_str(), points)).collect();
        let drawn = svg(&made::plot("p", &series));
        let (plotted, legend) = drawn.split_once("</svg>").unwrap();
        // Colour, dashes, and the shape of the marker: a path ends as a triangle or as a diamond.
        let looks = |group: &str| {
            let group = group.split("</g>").next().unwrap();
            let dashes = group.split("stroke-dasharray=").nth(1).unwrap().split('"').nth(1).unwrap();
            let shapes = ["<circle", "<rect", "h-8.4z", "l-4.4-4.4z"];
            let marker = shapes.into_iter().find(|shape| group.contains(shape));
            (group.split('"').next().unwrap().to_owned(), dashes.to_owned(), marker.unwrap())
        };
        let all = |text: &str| text.split(r#"<g class="s"#).skip(1).map(looks).collect::<Vec<_>>();
        assert_eq!(all(legend).len(), names.len());
        assert_eq!(all(plotted), all(legend));
    }

    #[test]
    fn sizes_on_an_axis_are_read_as_people_write_them() {
        let axis = Axis { label: "size", unit: "B", scale: Scale::Bytes };
        let ticks = Ruler::new(&axis, [1024.0, 1_048_576.0].into_iter(), 0.0, 1.0).ticks();
        assert!(ticks.iter().any(|(_, text)| text == "1K") && ticks.len() <= 9, "{ticks:?}");
    }
}
