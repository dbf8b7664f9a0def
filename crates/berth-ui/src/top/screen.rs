//! The terminal: what is typed changes an arrangement, and the lines that it shows are drawn.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ratatui::Frame;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line as Text, Span};
use ratatui::widgets::{Clear, Paragraph, Wrap};

use super::listing::{Arrangement, Cell, Column, Detail, Figures, Line, Shape, View, width};

/// How many lines the verdict of the selected line has, when it is not opened.
const DETAIL: u16 = 4;

const HELP: &[(&str, &str)] = &[
    ("1 2 3 4, Tab", "volumes, attention, nodes, drivers"),
    ("↑ ↓, j k", "select a line; PgUp, PgDn, Home, End too"),
    ("Enter", "show more or less of the selected line"),
    ("s, r", "sort by the next column, turn the order around"),
    ("/", "filter by words; Enter keeps the filter, Esc clears it"),
    ("a", "only what needs attention"),
    ("?", "this list"),
    ("q, Ctrl-C", "quit"),
];

/// What follows a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Draw,
    End,
}

/// What the first line says besides the figures.
pub(super) struct Header<'a> {
    pub(super) cluster: &'a str,
    /// Since when the API server does not answer, and why.
    pub(super) lost: Option<(Timestamp, String)>,
}

/// What the person at the terminal has chosen.
pub(super) struct Screen {
    arrangement: Arrangement,
    /// The selected line: its name stays selected when lines move.
    selected: usize,
    name: String,
    /// The first line in sight.
    first: usize,
    /// How many lines are in sight.
    height: usize,
    /// How many lines there are.
    count: usize,
    /// The columns of the view that was drawn last.
    columns: &'static [Column],
    typing: bool,
    open: bool,
    help: bool,
}

impl Screen {
    pub(super) fn new(arrangement: Arrangement) -> Self {
        Self {
            arrangement,
            selected: 0,
            name: String::new(),
            first: 0,
            height: 1,
            count: 0,
            columns: &[],
            typing: false,
            open: false,
            help: false,
        }
    }

    /// Takes in a key or another event of the terminal.
    pub(super) fn take(&mut self, event: &Event) -> Next {
        let Event::Key(key) = event else { return Next::Draw };
        if key.kind == KeyEventKind::Release {
            return Next::Draw;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Next::End;
        }
        if self.typing {
            self.type_filter(key);
            return Next::Draw;
        }
        if self.help {
            self.help = false;
            return Next::Draw;
        }
        match key.code {
            KeyCode::Char('q') => return Next::End,
            KeyCode::Char('?') => self.help = true,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('a') => self.arrange(|arrangement| arrangement.stuck = !arrangement.stuck),
            KeyCode::Char('r') => self.arrange(|arrangement| arrangement.reverse = !arrangement.reverse),
            KeyCode::Char('s') => self.sort_by_next(),
            KeyCode::Char(digit @ '1'..='4') => {
                self.show(View::ALL[digit as usize - '1' as usize]);
            }
            KeyCode::Tab => self.turn(1),
            KeyCode::BackTab => self.turn(View::ALL.len() - 1),
            KeyCode::Enter => self.open = !self.open,
            KeyCode::Esc if self.open => self.open = false,
            KeyCode::Esc => self.arrange(|arrangement| arrangement.filter.clear()),
            KeyCode::Down | KeyCode::Char('j') => self.select(self.selected.saturating_add(1)),
            KeyCode::Up | KeyCode::Char('k') => self.select(self.selected.saturating_sub(1)),
            KeyCode::PageDown => self.select(self.selected.saturating_add(self.height)),
            KeyCode::PageUp => self.select(self.selected.saturating_sub(self.height)),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            _ => {}
        }
        Next::Draw
    }

    fn type_filter(&mut self, key: &KeyEvent) {
        match key.code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.arrange(|arrangement| arrangement.filter.clear());
            }
            KeyCode::Backspace => self.arrange(|arrangement| {
                arrangement.filter.pop();
            }),
            KeyCode::Char(letter) => self.arrange(|arrangement| arrangement.filter.push(letter)),
            _ => {}
        }
    }

    /// Changes which lines are shown; the first one is selected then.
    fn arrange(&mut self, change: impl FnOnce(&mut Arrangement)) {
        change(&mut self.arrangement);
        (self.selected, self.first) = (0, 0);
        self.name.clear();
    }

    fn show(&mut self, view: View) {
        self.arrange(|arrangement| {
            *arrangement = Arrangement { view, filter: arrangement.filter.clone(), ..Arrangement::default() };
        });
    }

    fn turn(&mut self, by: usize) {
        let at = View::ALL.iter().position(|view| *view == self.arrangement.view).unwrap_or(0);
        self.show(View::ALL[(at + by) % View::ALL.len()]);
    }

    /// By the worst, then by each other column in turn.
    fn sort_by_next(&mut self) {
        let names: Vec<&str> = self.columns.iter().map(|column| column.name).collect();
        let at = names.iter().position(|name| name.eq_ignore_ascii_case(&self.arrangement.sort)).unwrap_or(0);
        let next = names.get(at + 1).or(names.first()).copied().unwrap_or_default();
        self.arrange(|arrangement| next.clone_into(&mut arrangement.sort));
    }

    fn select(&mut self, line: usize) {
        self.selected = line.min(self.count.saturating_sub(1));
        self.name.clear();
    }

    /// Finds the selected line again after lines came, went or moved, and keeps it in sight.
    fn keep_selected(&mut self, lines: &[&Line], height: usize) {
        (self.count, self.height) = (lines.len(), height.max(1));
        let is = |line: &&Line| line.cells[1].text == self.name;
        // Of one object several things may be wrong, in a line each.
        if !self.name.is_empty() && !lines.get(self.selected).is_some_and(is) {
            self.selected = lines.iter().position(is).unwrap_or(self.selected);
        }
        self.selected = self.selected.min(self.count.saturating_sub(1));
        self.name = lines.get(self.selected).map(|line| line.cells[1].text.clone()).unwrap_or_default();
        self.first = self.first.min(self.selected).max((self.selected + 1).saturating_sub(self.height));
        self.first = self.first.min(self.count.saturating_sub(self.height));
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, header: &Header<'_>, figures: &Figures) {
        let listing = figures.listing(self.arrangement.view);
        self.columns = listing.columns;
        let lines = listing.arranged(&self.arrangement);
        let refused = u16::from(!figures.unreadable.is_empty());
        let detail = if self.open { frame.area().height / 2 } else { DETAIL };
        let [top, summary, denied, tabs, head, body, below, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Length(refused),
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(1),
            Constraint::Length(detail),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        self.keep_selected(&lines, usize::from(body.height));
        draw_first_line(frame, top, header, figures.now);
        frame.render_widget(Paragraph::new(figures.summary.join("   ")), summary);
        let kinds: Vec<&str> = figures.unreadable.iter().map(|unreadable| unreadable.kind.as_str()).collect();
        let denied_text = format!("May not be read, so nothing is said of it: {}", kinds.join(", "));
        frame.render_widget(Paragraph::new(denied_text).style(style(Shape::Warn)), denied);
        frame.render_widget(Paragraph::new(self.tabs(lines.len(), listing.lines.len())), tabs);

        let widths = listing.widths(&lines, usize::from(body.width));
        let sorted = listing.column(&self.arrangement.sort).unwrap_or(0);
        let names = widths.iter().map(|(at, width)| {
            let column = &listing.columns[*at];
            let arrow = if self.arrangement.reverse { "↑" } else { "↓" };
            let name =
                if *at == sorted { format!("{} {arrow}", column.name) } else { column.name.to_owned() };
            padded(&name, *width, column.right)
        });
        let names = names.collect::<Vec<_>>().join("  ");
        frame.render_widget(Paragraph::new(names).style(Style::new().add_modifier(Modifier::BOLD)), head);
        if lines.is_empty() {
            frame.render_widget(Paragraph::new(self.nothing()).style(dim()), body);
        }
        let shown = lines.iter().enumerate().skip(self.first).take(usize::from(body.height));
        let texts: Vec<Text<'_>> = shown
            .map(|(at, line)| {
                let text = row(line, &widths, listing.columns);
                if at == self.selected {
                    text.style(Style::new().add_modifier(Modifier::REVERSED))
                } else {
                    text
                }
            })
            .collect();
        if !texts.is_empty() {
            frame.render_widget(Paragraph::new(texts), body);
        }
        if let Some(line) = lines.get(self.selected) {
            draw_detail(frame, below, line);
        }
        frame.render_widget(Paragraph::new(self.keys()).style(dim()), foot);
        if self.help {
            draw_help(frame);
        }
    }

    /// The views, and how many lines of the chosen one are shown.
    fn tabs(&self, shown: usize, all: usize) -> Text<'static> {
        let mut spans = Vec::new();
        for (number, view) in View::ALL.into_iter().enumerate() {
            let chosen = view == self.arrangement.view;
            let style = if chosen { Style::new().add_modifier(Modifier::REVERSED) } else { dim() };
            spans.extend([Span::styled(format!(" {} {} ", number + 1, view.name()), style), Span::raw(" ")]);
        }
        let count = if shown == all { format!("{all}") } else { format!("{shown} of {all}") };
        spans.push(Span::styled(format!(" {count}"), dim()));
        if self.arrangement.stuck {
            spans.push(Span::styled("  only what needs attention", dim()));
        }
        Text::from(spans)
    }

    fn nothing(&self) -> &'static str {
        match self.arrangement.view {
            _ if !self.arrangement.filter.is_empty() => "No line has these words. Esc clears the filter.",
            View::Volumes if self.arrangement.stuck => "No volume needs attention.",
            View::Volumes => "No volumes yet.",
            View::Attention => "Nothing needs attention.",
            View::Nodes => "No nodes.",
            View::Drivers => "No CSI drivers.",
        }
    }

    fn keys(&self) -> String {
        if self.typing {
            return format!("Filter: {}▏  Enter keeps it, Esc clears it", self.arrangement.filter);
        }
        let filter = &self.arrangement.filter;
        let filter = if filter.is_empty() { "/ filter".to_owned() } else { format!("/ filter: {filter}") };
        format!("↑↓ select  Enter more  s sort  r reverse  {filter}  a attention  Tab view  ? keys  q quit")
    }
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

fn style(shape: Shape) -> Style {
    match shape {
        Shape::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        Shape::Warn => Style::new().fg(Color::Yellow),
        Shape::Busy => Style::new().fg(Color::Cyan),
        Shape::Wait | Shape::Off => dim(),
        Shape::Ok => Style::new(),
    }
}

/// The mark of a shape, so that colour only repeats what it says.
fn mark(shape: Shape) -> &'static str {
    match shape {
        Shape::Bad => "◆",
        Shape::Warn => "▲",
        Shape::Busy => "◐",
        Shape::Wait => "○",
        Shape::Ok => "●",
        Shape::Off => "–",
    }
}

/// How full something is: amber from 90 %, red from 95 %.
fn level(part: f64) -> Style {
    match part {
        part if part >= 0.95 => style(Shape::Bad),
        part if part >= 0.90 => style(Shape::Warn),
        _ => Style::new(),
    }
}

/// A text in so many columns of the terminal: cut, or filled with spaces.
fn padded(text: &str, room: usize, right: bool) -> String {
    let mut text = text.to_owned();
    if width(&text) > room {
        while width(&text) + 1 > room && text.pop().is_some() {}
        text.push('…');
    }
    let gap = " ".repeat(room.saturating_sub(width(&text)));
    if right { gap + &text } else { text + &gap }
}

fn row(line: &Line, widths: &[(usize, usize)], columns: &[Column]) -> Text<'static> {
    let mut spans = Vec::new();
    for (at, room) in widths {
        let (cell, column) = (&line.cells[*at], &columns[*at]);
        if !spans.is_empty() {
            spans.push(Span::raw("  "));
        }
        match (at, cell.part) {
            (0, _) => {
                let text = format!("{} {}", mark(line.shape), cell.text);
                spans.push(Span::styled(padded(&text, *room, false), style(line.shape)));
            }
            (_, Some(part)) => spans.extend(bar(cell, part, *room)),
            _ => spans.push(Span::raw(padded(&cell.text, *room, column.right))),
        }
    }
    Text::from(spans)
}

/// A bar with its percentage, where there is room for both.
fn bar(cell: &Cell, part: f64, room: usize) -> Vec<Span<'static>> {
    let Some(wide) = room.checked_sub(6).filter(|wide| *wide > 2) else {
        return vec![Span::styled(padded(&cell.text, room, true), level(part))];
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a part of a few columns"
    )]
    let full = ((part * wide as f64).round() as usize).min(wide);
    vec![
        Span::styled("█".repeat(full), level(part)),
        Span::styled("░".repeat(wide - full), dim()),
        Span::styled(padded(&cell.text, 6, true), level(part)),
    ]
}

fn draw_first_line(frame: &mut Frame<'_>, area: Rect, header: &Header<'_>, now: Timestamp) {
    let [left, right] = Layout::horizontal([Constraint::Min(10), Constraint::Length(44)]).areas(area);
    let title = Text::from(vec![
        Span::styled("berth top", Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!("  {}", crate::words::printable(header.cluster))),
    ]);
    frame.render_widget(Paragraph::new(title), left);
    let (text, shown) = match &header.lost {
        Some((since, why)) => {
            let since = (now.as_second() - since.as_second()).max(0);
            (format!("no answer for {since} s: {}", crate::words::printable(why)), style(Shape::Bad))
        }
        None => (format!("{} UTC", now.to_zoned(TimeZone::UTC).strftime("%H:%M:%S")), dim()),
    };
    frame.render_widget(Paragraph::new(text).style(shown).right_aligned(), right);
}

fn draw_detail(frame: &mut Frame<'_>, area: Rect, line: &Line) {
    let texts: Vec<Text<'_>> = line
        .detail
        .iter()
        .map(|detail| match detail {
            Detail::Sentence(_) => Text::raw(detail.text()),
            Detail::Command(_) => Text::styled(detail.text(), Style::new().fg(Color::Cyan)),
            Detail::Fact(..) => Text::styled(detail.text(), dim()),
        })
        .collect();
    let rule = "─".repeat(usize::from(area.width));
    let texts = [vec![Text::styled(rule, dim())], texts].concat();
    frame.render_widget(Paragraph::new(texts).wrap(Wrap { trim: true }), area);
}

fn draw_help(frame: &mut Frame<'_>) {
    let whole = frame.area();
    let high = u16::try_from(HELP.len()).unwrap_or(0) + 2;
    let wide = 78.min(whole.width);
    let area = Rect {
        x: (whole.width - wide) / 2,
        y: whole.height.saturating_sub(high) / 2,
        width: wide,
        height: high.min(whole.height),
    };
    let mut texts = vec![Text::raw("")];
    texts.extend(HELP.iter().map(|(keys, what)| Text::raw(format!("  {}  {what}", padded(keys, 14, false)))));
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(texts).style(Style::new().add_modifier(Modifier::REVERSED)), area);
}

/// What is shown until the first lists are complete.
pub(super) fn draw_loading(frame: &mut Frame<'_>, header: &Header<'_>, progress: &[(String, bool, usize)]) {
    let [top, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(frame.area());
    draw_first_line(frame, top, header, Timestamp::now());
    let texts: Vec<Text<'_>> = progress
        .iter()
        .map(|(kind, complete, count)| {
            let state = if *complete { "complete" } else { "being read" };
            Text::raw(format!("{kind}: {count}, {state}"))
        })
        .collect();
    frame.render_widget(Paragraph::new(texts).style(dim()), body);
}

#[cfg(test)]
mod tests;
