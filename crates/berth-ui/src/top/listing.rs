//! What a cluster's storage looks like as lines and columns: volumes, what needs attention, nodes and drivers; sorted and filtered.

use std::cmp::Ordering;
use std::fmt::Write as _;

use jiff::Timestamp;
use ratatui::text::Span;

use crate::calls::CallCounts;
use crate::diagnose::{Observed, judge, span};
use crate::inventory::{DriverRow, NodeRow, drivers, nodes};
use crate::rows::{Attention, Row, attention, table};
use crate::state::{ClusterState, Unreadable};
use crate::words::{counted, gib, printable};

/// Which of the listings is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum View {
    /// Every claim, and every volume that belongs to none.
    #[default]
    Volumes,
    /// What needs a person, the worst first.
    Attention,
    /// The nodes, with the drivers on each.
    Nodes,
    /// The CSI drivers, with their calls.
    Drivers,
}

impl View {
    /// All of them, in the order of their keys.
    pub const ALL: [Self; 4] = [Self::Volumes, Self::Attention, Self::Nodes, Self::Drivers];

    /// The names of its columns.
    pub fn columns(self) -> Vec<&'static str> {
        self.all_columns().iter().map(|column| column.name).collect()
    }

    fn all_columns(self) -> &'static [Column] {
        match self {
            Self::Volumes => VOLUMES,
            Self::Attention => ATTENTION,
            Self::Nodes => NODES,
            Self::Drivers => DRIVERS,
        }
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Volumes => "Volumes",
            Self::Attention => "Attention",
            Self::Nodes => "Nodes",
            Self::Drivers => "Drivers",
        }
    }
}

/// Which lines of which view are shown, and in which order.
#[derive(Debug, Clone, Default)]
pub struct Arrangement {
    /// The view whose lines are shown.
    pub view: View,
    /// The name of the column to sort by; the view's own order if it has no such column.
    pub sort: String,
    /// Whether the order is turned around.
    pub reverse: bool,
    /// Words that a line must all have.
    pub filter: String,
    /// Whether only volumes are shown that need attention.
    pub stuck: bool,
}

/// How a line or a cell is to be drawn, by the shapes of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Shape {
    Bad,
    Warn,
    Busy,
    Wait,
    Ok,
    Off,
}

impl Shape {
    fn of(word: &str) -> Self {
        match word {
            "bad" => Self::Bad,
            "warn" => Self::Warn,
            "busy" => Self::Busy,
            "wait" => Self::Wait,
            "ok" => Self::Ok,
            _ => Self::Off,
        }
    }
}

/// One cell: its text, and what it is sorted by if that is a number.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) number: Option<f64>,
    /// How full something is, from 0 to 1: drawn as a bar beside the text.
    pub(super) part: Option<f64>,
}

impl Cell {
    fn text(text: impl AsRef<str>) -> Self {
        let text = text.as_ref();
        Self { text: if text.is_empty() { "–".to_owned() } else { printable(text) }, ..Self::default() }
    }

    #[expect(clippy::cast_precision_loss, reason = "it is only sorted by")]
    fn size(bytes: i128) -> Self {
        Self { text: size(bytes), number: Some(bytes as f64), ..Self::default() }
    }

    #[expect(clippy::cast_precision_loss, reason = "nobody has so many")]
    fn count(count: usize) -> Self {
        Self { text: count.to_string(), number: Some(count as f64), ..Self::default() }
    }

    #[expect(clippy::cast_precision_loss, reason = "it is shown as a whole percentage")]
    fn part(used: Option<u64>, all: Option<u64>) -> Self {
        match (used, all) {
            (Some(used), Some(all)) if all > 0 => {
                let part = used as f64 / all as f64;
                // Rounded down, as the verdict does: what is not quite full is never called 100 %.
                Self {
                    text: format!("{:.0} %", (part * 100.0).floor()),
                    number: Some(part),
                    part: Some(part.min(1.0)),
                }
            }
            _ => Self { text: "–".to_owned(), number: Some(-1.0), part: None },
        }
    }

    fn age(since: i64, now: Timestamp) -> Self {
        if since == 0 {
            return Self { text: "–".to_owned(), number: Some(-1.0), part: None };
        }
        let age = std::time::Duration::from_millis(u64::try_from(now.as_millisecond() - since).unwrap_or(0));
        Self { text: span(age), number: Some(age.as_secs_f64()), part: None }
    }
}

/// One line of a listing.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) shape: Shape,
    pub(super) cells: Vec<Cell>,
    /// Its place in the view's own order: the worst first.
    rank: usize,
    /// Whether it needs a person.
    needs_attention: bool,
    /// The sentences of its verdict, and facts about it: what is shown below the listing.
    pub(super) detail: Vec<Detail>,
}

/// One line below the listing.
#[derive(Debug, Clone)]
pub(super) enum Detail {
    /// Why it is so, or what to do.
    Sentence(String),
    /// A command to copy.
    Command(String),
    /// A fact, with its name.
    Fact(&'static str, String),
}

impl Detail {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Sentence(text) => text.clone(),
            Self::Command(command) => format!("$ {command}"),
            Self::Fact(name, text) => format!("{name}: {text}"),
        }
    }
}

/// A column: its name, how wide it may get, and when it goes if there is no room; the greatest first, 0 never.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) widest: usize,
    pub(super) goes: u8,
    pub(super) right: bool,
}

const fn column(name: &'static str, widest: usize, goes: u8) -> Column {
    Column { name, widest, goes, right: false }
}

const fn number(name: &'static str, widest: usize, goes: u8) -> Column {
    Column { name, widest, goes, right: true }
}

const VOLUMES: &[Column] = &[
    column("STATE", 17, 0),
    column("CLAIM", 48, 0),
    column("POD", 32, 5),
    column("NODE", 24, 4),
    column("CLASS", 20, 6),
    number("SIZE", 10, 1),
    number("USED", 15, 0),
    number("INODES", 6, 8),
    column("PHASE", 11, 7),
    number("AGE", 8, 2),
];
const ATTENTION: &[Column] =
    &[column("STATE", 17, 0), column("OBJECT", 48, 0), number("FOR", 8, 2), column("WHY", 200, 1)];
const NODES: &[Column] = &[
    column("STATE", 10, 0),
    column("NODE", 40, 0),
    column("ZONE", 20, 3),
    column("KUBELET", 20, 4),
    number("VOLUMES", 8, 0),
    column("DRIVERS", 80, 1),
];
const DRIVERS: &[Column] = &[
    column("STATE", 15, 0),
    column("DRIVER", 40, 0),
    number("NODES", 9, 0),
    number("VOLUMES", 8, 0),
    number("CALLS/H", 8, 1),
    number("FAILED", 7, 1),
    number("P95", 10, 2),
    column("CAN", 40, 4),
];

/// What one view shows.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) columns: &'static [Column],
    pub(super) lines: Vec<Line>,
}

/// What was found at one moment, for all views.
#[derive(Debug)]
pub(super) struct Figures {
    listings: [Listing; 4],
    pub(super) summary: Vec<String>,
    pub(super) unreadable: Vec<Unreadable>,
    pub(super) now: Timestamp,
}

impl Figures {
    pub(super) fn of(state: &ClusterState, calls: &CallCounts) -> Self {
        let observed = Observed::new(state);
        let findings = judge(&observed);
        let table = table(&observed, &findings);
        let attention = attention(state, &findings, &table);
        let (nodes, drivers) = (nodes(&observed), drivers(state, calls));
        let summary = summary(state, &table.rows, attention.len(), &nodes, calls);
        let now = state.now;
        let listing = |view: View, lines| Listing { columns: view.all_columns(), lines };
        Self {
            listings: [
                listing(View::Volumes, table.rows.iter().map(|row| volume(row, now)).collect()),
                listing(
                    View::Attention,
                    attention.iter().enumerate().map(|entry| needing(entry, now)).collect(),
                ),
                listing(View::Nodes, nodes.iter().map(node).collect()),
                listing(View::Drivers, drivers.iter().map(driver).collect()),
            ],
            summary,
            unreadable: state.unreadable.clone(),
            now,
        }
    }

    pub(super) fn listing(&self, view: View) -> &Listing {
        &self.listings[View::ALL.iter().position(|known| *known == view).unwrap_or_default()]
    }
}

/// A size with an ordinary space, which people search for.
fn size(bytes: i128) -> String {
    gib(bytes).replace('\u{a0}', " ")
}

fn summary(
    state: &ClusterState,
    rows: &[Row],
    attention: usize,
    nodes: &[NodeRow],
    calls: &CallCounts,
) -> Vec<String> {
    let claims = rows.iter().filter(|row| !row.ns.is_empty());
    let bound = claims.clone().filter(|row| row.phase == "Bound").count();
    let used: u64 = rows.iter().filter_map(|row| row.used).sum();
    let of: u64 = rows.iter().filter_map(|row| row.cap).sum();
    let mut parts = vec![
        match attention {
            0 => "nothing needs attention".to_owned(),
            1 => "1 thing needs attention".to_owned(),
            many => format!("{many} things need attention"),
        },
        format!("{}, {bound} bound", counted(claims.count(), "claim")),
    ];
    parts.push(if of == 0 {
        "usage not reported".to_owned()
    } else {
        format!("{} used of {}", size(i128::from(used)), size(i128::from(of)))
    });
    if state.nodes.are_known() {
        let ready = nodes.iter().filter(|node| node.ready).count();
        parts.push(format!("{ready} of {} ready", counted(nodes.len(), "node")));
    }
    parts.push(match calls.per_second(state.now) {
        Some((all, failed)) if failed > 0.0 => format!("{all:.1} calls/s, {failed:.1} failed/s"),
        Some((all, _)) => format!("{all:.1} calls/s"),
        None => "calls not seen here".to_owned(),
    });
    parts
}

fn volume(row: &Row, now: Timestamp) -> Line {
    let shape = Shape::of(row.state.0);
    let name = if row.ns.is_empty() { &row.claim } else { &row.id };
    let pod = if row.pods > 1 { format!("{}, +{}", row.pod, row.pods - 1) } else { row.pod.clone() };
    let mut detail: Vec<Detail> = Vec::new();
    if let Some(verdict) = &row.trouble {
        detail
            .extend([Detail::Sentence(printable(&verdict.why)), Detail::Sentence(printable(&verdict.todo))]);
        detail.extend(verdict.cmd.iter().map(|command| Detail::Command(printable(command))));
        detail.push(Detail::Fact("evidence", printable(&verdict.evidence)));
    }
    detail.extend(row.wait.iter().map(|wait| Detail::Sentence(printable(wait))));
    for (fact, text) in [
        ("volume", &row.pv),
        ("driver", &row.driver),
        ("access", &row.mode),
        ("reclaim policy", &row.reclaim),
    ] {
        if !text.is_empty() {
            detail.push(Detail::Fact(fact, printable(text)));
        }
    }
    if let (Some(used), Some(all)) = (row.used, row.cap) {
        let text = format!("{} of {}", size(i128::from(used)), size(i128::from(all)));
        detail.push(Detail::Fact("used", text));
    }
    let rank = if row.trouble.is_some() { row.rank } else { usize::MAX };
    Line {
        shape,
        cells: vec![
            Cell::text(&row.state.1),
            Cell::text(name),
            Cell::text(pod),
            Cell::text(&row.node),
            Cell::text(&row.cls),
            Cell::size(row.size),
            Cell::part(row.used, row.cap),
            Cell { part: None, ..Cell::part(row.inodes_used, row.inodes) },
            Cell::text(&row.phase),
            Cell::age(row.created, now),
        ],
        rank,
        needs_attention: row.trouble.is_some(),
        detail,
    }
}

fn needing((rank, entry): (usize, &Attention), now: Timestamp) -> Line {
    let verdict = &entry.verdict;
    let mut detail =
        vec![Detail::Sentence(printable(&verdict.why)), Detail::Sentence(printable(&verdict.todo))];
    detail.extend(verdict.cmd.iter().map(|command| Detail::Command(printable(command))));
    detail.push(Detail::Fact("evidence", printable(&verdict.evidence)));
    Line {
        shape: Shape::of(verdict.state),
        cells: vec![
            Cell::text(&verdict.word),
            Cell::text(entry.name.trim_start_matches('/')),
            Cell::age(verdict.since, now),
            Cell::text(&verdict.why),
        ],
        rank,
        needs_attention: true,
        detail,
    }
}

fn node(row: &NodeRow) -> Line {
    let drivers = row.drivers.iter().map(|(name, driver)| {
        let count = driver.count.unwrap_or_default();
        let limit = driver.limit.map_or_else(String::new, |limit| format!(" of {limit}"));
        let away = if driver.on { "" } else { ", not registered" };
        format!("{name} ({count}{limit}{away})")
    });
    let drivers = drivers.collect::<Vec<_>>().join(", ");
    Line {
        shape: if row.ready { Shape::Ok } else { Shape::Bad },
        cells: vec![
            Cell::text(if row.ready { "Ready" } else { "Not ready" }),
            Cell::text(&row.name),
            Cell::text(row.zone.as_deref().unwrap_or_default()),
            Cell::text(row.kubelet.as_deref().unwrap_or_default()),
            Cell::count(row.volumes),
            Cell::text(&drivers),
        ],
        rank: usize::from(row.ready),
        needs_attention: !row.ready,
        detail: vec![Detail::Fact("drivers, with their volumes there", printable(&drivers))],
    }
}

fn driver(row: &DriverRow) -> Line {
    let everywhere = row.on > 0 && row.on >= row.all;
    let figure = |of: fn(&crate::calls::CallFigures) -> usize| {
        row.calls.as_ref().map_or_else(|| Cell::text(""), |calls| Cell::count(of(calls)))
    };
    let p95 = row.calls.as_ref().and_then(|calls| calls.p95);
    let mut detail = vec![Detail::Fact("can", printable(&row.can))];
    if !row.declared {
        detail.insert(0, Detail::Sentence("There is no CSIDriver object of this name.".to_owned()));
    }
    if row.calls.is_none() {
        detail.push(Detail::Sentence(
            "Its calls are not seen: `berth up` keeps those of its own machine.".to_owned(),
        ));
    }
    Line {
        shape: if everywhere { Shape::Ok } else { Shape::Warn },
        cells: vec![
            Cell::text(if everywhere { "Registered" } else { "Too few nodes" }),
            Cell::text(&row.name),
            Cell { text: format!("{} of {}", row.on, row.all), ..Cell::count(row.on) },
            Cell::count(row.volumes),
            figure(|calls| calls.count),
            figure(|calls| calls.failed),
            Cell {
                text: p95.map_or_else(|| "–".to_owned(), |ms| format!("{ms:.1} ms")),
                number: Some(p95.unwrap_or(-1.0)),
                part: None,
            },
            Cell::text(&row.can),
        ],
        rank: usize::from(everywhere),
        needs_attention: !everywhere,
        detail,
    }
}

impl Listing {
    /// The lines that an arrangement shows, in its order.
    pub(super) fn arranged(&self, arrangement: &Arrangement) -> Vec<&Line> {
        let words: Vec<String> = arrangement.filter.split_whitespace().map(str::to_lowercase).collect();
        let has = |line: &&Line| {
            if arrangement.stuck && !line.needs_attention {
                return false;
            }
            let texts: Vec<String> = line.cells.iter().map(|cell| cell.text.to_lowercase()).collect();
            words.iter().all(|word| texts.iter().any(|text| text.contains(word)))
        };
        let mut lines: Vec<&Line> = self.lines.iter().filter(has).collect();
        let by = self.column(&arrangement.sort);
        let order = |a: &&Line, b: &&Line| match by {
            None => a.rank.cmp(&b.rank).then(a.shape.cmp(&b.shape)),
            Some(column) => compare(&a.cells[column], &b.cells[column]),
        };
        lines.sort_by(|a, b| {
            let order = order(a, b);
            let order = if arrangement.reverse { order.reverse() } else { order };
            order.then_with(|| a.cells[1].text.cmp(&b.cells[1].text))
        });
        lines
    }

    /// The column of a name; `None` for the view's own order.
    pub(super) fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name.eq_ignore_ascii_case(name)).filter(|at| *at > 0)
    }

    /// The columns that fit into a width, and how wide each is.
    pub(super) fn widths(&self, lines: &[&Line], room: usize) -> Vec<(usize, usize)> {
        let mut shown: Vec<(usize, usize)> = self
            .columns
            .iter()
            .enumerate()
            .map(|(at, column)| {
                let widest = lines.iter().map(|line| width(&line.cells[at].text)).max().unwrap_or(0);
                let bar = if lines.iter().any(|line| line.cells[at].part.is_some()) { 8 } else { 0 };
                let mark = if at == 0 { 2 } else { 0 };
                // A column that the lines are sorted by has an arrow behind its name.
                (at, (widest + bar + mark).max(width(column.name) + 2).min(column.widest))
            })
            .collect();
        let taken = |shown: &[(usize, usize)]| shown.iter().map(|(_, width)| width + 2).sum::<usize>();
        while taken(&shown) > room + 2 {
            let last = shown.iter().enumerate().max_by_key(|(_, (at, _))| self.columns[*at].goes);
            match last.filter(|(_, (at, _))| self.columns[*at].goes > 0).map(|(at, _)| at) {
                Some(at) => shown.remove(at),
                None => break,
            };
        }
        // The name takes what is left, or gives what is missing.
        if let Some(name) = shown.iter().position(|(at, _)| *at == 1) {
            let others = taken(&shown) - shown[name].1;
            shown[name].1 = shown[name].1.min((room + 2).saturating_sub(others)).max(8);
        }
        shown
    }
}

fn compare(a: &Cell, b: &Cell) -> Ordering {
    match (a.number, b.number) {
        // The greatest first: that is what people look for.
        (Some(a), Some(b)) => b.total_cmp(&a),
        _ => a.text.cmp(&b.text),
    }
}

/// How many columns of a terminal a text takes.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// The view as plain text: the summary, what may not be read, and all lines.
pub(super) fn text(figures: &Figures, arrangement: &Arrangement) -> String {
    let listing = figures.listing(arrangement.view);
    let lines = listing.arranged(arrangement);
    // Writing to memory does not fail.
    let mut text = String::new();
    let _ = writeln!(text, "{}", figures.summary.join("; "));
    for unreadable in &figures.unreadable {
        let _ = writeln!(text, "not read: {}: {}", unreadable.kind, printable(&unreadable.why));
    }
    let widest = |at: usize| {
        let cells = lines.iter().map(|line| width(&line.cells[at].text));
        cells.chain([width(listing.columns[at].name)]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..listing.columns.len()).map(widest).collect();
    let mut row = |cells: Vec<&str>| {
        let padded: Vec<String> = cells
            .iter()
            .zip(listing.columns)
            .zip(&widths)
            .map(|((cell, column), widest)| {
                let gap = " ".repeat(widest - width(cell));
                if column.right { format!("{gap}{cell}") } else { format!("{cell}{gap}") }
            })
            .collect();
        let _ = writeln!(text, "{}", padded.join("  ").trim_end());
    };
    row(listing.columns.iter().map(|column| column.name).collect());
    for line in &lines {
        row(line.cells.iter().map(|cell| cell.text.as_str()).collect());
    }
    text
}

#[cfg(test)]
pub(super) mod tests;
