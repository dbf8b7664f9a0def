//! The view in the terminal: calls as they come, one in full, and keys to order things.
//!
//! `Screen` is the state, changed by events and keys and drawn as a whole; it knows neither the terminal nor the workbench, so that
//! tests drive it. [`run`] joins the three.

use std::io;
use std::sync::Arc;

use ratatui::crossterm::event::{
    self, Event as TerminalEvent, KeyCode, KeyEvent, KeyEventKind, KeyModifiers,
};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Paragraph, Wrap};
use ratatui::{DefaultTerminal, Frame};
use tokio::sync::mpsc;

use crate::lines::{clock, is_routine, took};
use crate::record::{CallRecord, Event, HeldCall, Note, short};
use crate::workbench::Workbench;

/// How many rows are kept.
const ROWS_KEPT: usize = 5000;
/// How many effects and rules are shown below a call in the list.
const BELOW_CALL: usize = 4;
const KEYS: &str =
    "r restart  k kill  2 repeat every call  f fault  s step  ↑↓ Enter details  v all calls  q quit";

/// What a person orders by a key.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Order {
    Restart,
    Kill,
    Repeat,
    Fault(String),
    Step,
    Next,
    Continue,
    Answer(String),
    Quit,
}

/// What the main part of the view shows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mode {
    List,
    /// One row in full, from this line on.
    Detail(usize),
    /// A line that is being typed.
    Typing(Prompt, String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prompt {
    Fault,
    Answer,
}

/// The state of the view.
struct Screen {
    title: String,
    rows: Vec<Event>,
    /// The row that is chosen, among those that are shown.
    selected: usize,
    /// Whether the newest row is the chosen one.
    follows: bool,
    shows_all: bool,
    mode: Mode,
    /// The calls that wait.
    held: Vec<HeldCall>,
    /// What the last order came to.
    message: String,
}

/// Shows events, first those that came `earlier`, until the person quits.
pub async fn run(
    bench: &Arc<Workbench>,
    earlier: Vec<Event>,
    events: &mut mpsc::UnboundedReceiver<Event>,
    title: String,
) -> io::Result<()> {
    let mut screen = Screen::new(title);
    for event in earlier {
        screen.add(event);
    }
    let mut terminal = ratatui::try_init()?;
    let result = follow(bench, events, screen, &mut terminal).await;
    ratatui::restore();
    result
}

async fn follow(
    bench: &Arc<Workbench>,
    events: &mut mpsc::UnboundedReceiver<Event>,
    mut screen: Screen,
    terminal: &mut DefaultTerminal,
) -> io::Result<()> {
    let (sender, mut keys) = mpsc::unbounded_channel();
    // Ends with the process: nothing interrupts a read of the terminal.
    std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
        while let Ok(read) = event::read() {
            if sender.send(read).is_err() {
                return;
            }
        }
    })?;
    loop {
        let state = State { pid: bench.pid(), faults: bench.faults(), steps: bench.is_stepping() };
        terminal.draw(|frame| screen.draw(frame, &state))?;
        tokio::select! {
            event = events.recv() => match event {
                Some(event) => {
                    screen.add(event);
                    while let Ok(event) = events.try_recv() {
                        screen.add(event);
                    }
                }
                None => return Ok(()),
            },
            key = keys.recv() => {
                let Some(TerminalEvent::Key(key)) = key else {
                    if key.is_none() {
                        return Ok(());
                    }
                    continue;
                };
                match screen.press(key) {
                    Some(Order::Quit) => return Ok(()),
                    Some(order) => screen.message = carry_out(bench, order),
                    None => {}
                }
            }
        }
    }
}

fn carry_out(bench: &Arc<Workbench>, order: Order) -> String {
    let outcome = match order {
        Order::Restart => {
            bench.restart();
            Ok(())
        }
        Order::Kill => {
            bench.kill();
            Ok(())
        }
        Order::Repeat => {
            bench.toggle_repeat();
            Ok(())
        }
        Order::Fault(text) => bench.add_fault(&text),
        Order::Step => {
            if bench.is_stepping() {
                bench.step_off();
            } else {
                bench.step_on();
            }
            Ok(())
        }
        Order::Next => {
            bench.step_next();
            Ok(())
        }
        Order::Continue => {
            bench.step_off();
            Ok(())
        }
        Order::Answer(text) => bench.answer(&text),
        Order::Quit => Ok(()),
    };
    outcome.err().unwrap_or_default()
}

/// What the head of the view says of the workbench.
struct State {
    pid: Option<u32>,
    faults: Vec<String>,
    steps: bool,
}

impl Screen {
    fn new(title: String) -> Self {
        Self {
            title,
            rows: Vec::new(),
            selected: 0,
            follows: true,
            shows_all: false,
            mode: Mode::List,
            held: Vec::new(),
            message: String::new(),
        }
    }

    fn add(&mut self, event: Event) {
        match &event {
            Event::Held(held) => {
                self.held.push(held.clone());
                return;
            }
            Event::Call(call) => self.held.retain(|held| held.number != call.number),
            Event::Note(_) => {}
        }
        self.rows.push(event);
        if self.rows.len() > ROWS_KEPT {
            self.rows.remove(0);
        }
        if self.follows {
            self.selected = self.shown().len().saturating_sub(1);
        }
    }

    /// The rows that are shown.
    fn shown(&self) -> Vec<&Event> {
        let routine = |event: &&Event| matches!(event, Event::Call(call) if is_routine(call));
        self.rows.iter().filter(|event| self.shows_all || !routine(event)).collect()
    }

    /// Takes a key; what it orders has to be carried out.
    fn press(&mut self, key: KeyEvent) -> Option<Order> {
        if key.kind == KeyEventKind::Release {
            return None;
        }
        self.message.clear();
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Some(Order::Quit);
        }
        match self.mode.clone() {
            Mode::Typing(prompt, text) => self.type_key(prompt, text, key.code),
            Mode::Detail(from) => {
                match key.code {
                    KeyCode::Up => self.mode = Mode::Detail(from.saturating_sub(1)),
                    KeyCode::Down => self.mode = Mode::Detail(from + 1),
                    KeyCode::PageUp => self.mode = Mode::Detail(from.saturating_sub(10)),
                    KeyCode::PageDown => self.mode = Mode::Detail(from + 10),
                    KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q') => self.mode = Mode::List,
                    _ => {}
                }
                None
            }
            Mode::List => self.list_key(key.code),
        }
    }

    fn type_key(&mut self, prompt: Prompt, mut text: String, key: KeyCode) -> Option<Order> {
        match key {
            KeyCode::Esc => self.mode = Mode::List,
            KeyCode::Enter => {
                self.mode = Mode::List;
                return Some(match prompt {
                    Prompt::Fault => Order::Fault(text),
                    Prompt::Answer => Order::Answer(text),
                });
            }
            KeyCode::Backspace => {
                text.pop();
                self.mode = Mode::Typing(prompt, text);
            }
            KeyCode::Char(c) => {
                text.push(c);
                self.mode = Mode::Typing(prompt, text);
            }
            _ => {}
        }
        None
    }

    fn list_key(&mut self, key: KeyCode) -> Option<Order> {
        let last = self.shown().len().saturating_sub(1);
        match key {
            KeyCode::Char('q') => return Some(Order::Quit),
            KeyCode::Char('r') => return Some(Order::Restart),
            KeyCode::Char('k') => return Some(Order::Kill),
            KeyCode::Char('2') => return Some(Order::Repeat),
            KeyCode::Char('s') => return Some(Order::Step),
            KeyCode::Char('n') => return Some(Order::Next),
            KeyCode::Char('c') => return Some(Order::Continue),
            KeyCode::Char('f') => self.mode = Mode::Typing(Prompt::Fault, String::new()),
            KeyCode::Char('a') if !self.held.is_empty() => {
                self.mode = Mode::Typing(Prompt::Answer, String::new());
            }
            KeyCode::Char('v') => {
                self.shows_all = !self.shows_all;
                self.selected = self.shown().len().saturating_sub(1);
                self.follows = true;
            }
            KeyCode::Enter if !self.rows.is_empty() => self.mode = Mode::Detail(0),
            KeyCode::Up => self.select(self.selected.saturating_sub(1), last),
            KeyCode::Down => self.select(self.selected + 1, last),
            KeyCode::PageUp => self.select(self.selected.saturating_sub(10), last),
            KeyCode::PageDown => self.select(self.selected + 10, last),
            KeyCode::Home => self.select(0, last),
            KeyCode::End => self.select(last, last),
            _ => {}
        }
        None
    }

    fn select(&mut self, row: usize, last: usize) {
        self.selected = row.min(last);
        self.follows = self.selected == last;
    }

    fn draw(&self, frame: &mut Frame<'_>, state: &State) {
        let waiting = u16::from(!self.held.is_empty()) * 3;
        let parts =
            [Constraint::Length(2), Constraint::Min(1), Constraint::Length(waiting), Constraint::Length(1)];
        let [top, main, below, foot] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(Paragraph::new(self.head(state)), top);
        let height = usize::from(main.height);
        let lines = match &self.mode {
            Mode::Detail(from) => {
                let lines = self.shown().get(self.selected).map(|event| details(event)).unwrap_or_default();
                let from = (*from).min(lines.len().saturating_sub(1));
                lines.into_iter().skip(from).take(height).collect()
            }
            _ => self.list(height),
        };
        let shown = Paragraph::new(Text::from(lines));
        let is_detail = matches!(self.mode, Mode::Detail(_));
        frame.render_widget(if is_detail { shown.wrap(Wrap { trim: false }) } else { shown }, main);
        if let Some(first) = self.held.first() {
            frame.render_widget(Paragraph::new(waiting_lines(first, self.held.len())), below);
        }
        frame.render_widget(Paragraph::new(self.foot()), foot);
    }

    fn head(&self, state: &State) -> Text<'static> {
        let pid = state.pid.map_or_else(|| "does not run".to_owned(), |pid| format!("process {pid}"));
        let faults = if state.faults.is_empty() {
            String::new()
        } else {
            format!("  faults: {}", state.faults.join(" "))
        };
        let steps = if state.steps { "  stepping" } else { "" };
        let broken = self.rows.iter().map(faults_of).sum::<usize>();
        let judged = match broken {
            0 => Span::styled("  no rule broken", Style::new().fg(Color::Green)),
            count => {
                Span::styled(format!("  ✗ {count}"), Style::new().fg(Color::Red).add_modifier(Modifier::BOLD))
            }
        };
        let title = Span::styled(self.title.clone(), Style::new().add_modifier(Modifier::BOLD));
        Text::from(vec![
            Line::from(vec![title, Span::raw(format!("  {pid}")), judged]),
            Line::from(vec![Span::styled(format!("{faults}{steps}"), Style::new().fg(Color::Magenta))]),
        ])
    }

    fn foot(&self) -> Line<'static> {
        match &self.mode {
            Mode::Typing(Prompt::Fault, text) => Line::from(format!("fault (empty: none): {text}▏")),
            Mode::Typing(Prompt::Answer, text) => {
                Line::from(format!("answer (OK [ID], or CODE MESSAGE): {text}▏"))
            }
            Mode::Detail(_) => Line::from("↑↓ scroll  Esc back"),
            Mode::List if !self.message.is_empty() => {
                Line::from(Span::styled(self.message.clone(), Style::new().fg(Color::Red)))
            }
            Mode::List => Line::from(Span::styled(KEYS, Style::new().add_modifier(Modifier::DIM))),
        }
    }

    /// The rows around the chosen one that fit.
    fn list(&self, height: usize) -> Vec<Line<'static>> {
        let shown = self.shown();
        let mut lines: Vec<Line<'static>> = Vec::new();
        let mut end = 0;
        // Whatever is above is cut off, so that the chosen row is the last if it is the newest.
        let first = self.selected.saturating_sub(height);
        for (index, event) in shown.iter().enumerate().skip(first) {
            lines.extend(row(event, index == self.selected));
            if index <= self.selected {
                end = lines.len();
            } else if lines.len() >= end + height {
                break;
            }
        }
        let skip = end.saturating_sub(height);
        lines.into_iter().skip(skip).take(height).collect()
    }
}

fn faults_of(event: &Event) -> usize {
    match event {
        Event::Call(call) => call.broken.iter().filter(|broken| broken.is_fault()).count(),
        Event::Note(note) => usize::from(note.fault),
        Event::Held(_) => 0,
    }
}

fn row(event: &Event, is_selected: bool) -> Vec<Line<'static>> {
    let mark = if is_selected { "▶" } else { " " };
    match event {
        Event::Call(call) => {
            let code = Style::new().fg(if call.code == "OK" { Color::Green } else { Color::Yellow });
            let mut lines = vec![Line::from(vec![
                Span::raw(format!("{mark}{} {:>4}  {:<28} ", clock(call.time), call.number, call.name())),
                Span::styled(format!("{:<20}", call.code), code),
                Span::raw(format!("{:>10}", took(call))),
                Span::styled(faults_text(call), Style::new().fg(Color::Magenta)),
            ])];
            lines.extend(below(call));
            lines
        }
        Event::Note(note) => note_lines(note, mark),
        Event::Held(_) => Vec::new(),
    }
}

fn faults_text(call: &CallRecord) -> String {
    if call.faults.is_empty() { String::new() } else { format!("  ! {}", call.faults.join(" ")) }
}

fn below(call: &CallRecord) -> Vec<Line<'static>> {
    let red = Style::new().fg(Color::Red);
    let broken = call.broken.iter().map(|broken| {
        Line::from(Span::styled(format!("                     ✗ {}: {}", broken.id, broken.found), red))
    });
    let message = (!call.message.is_empty()).then(|| format!("                     {}", call.message));
    let effects = call.effects.iter().take(BELOW_CALL).map(|effect| format!("                     {effect}"));
    let dim = Style::new().add_modifier(Modifier::DIM);
    message
        .into_iter()
        .map(Line::from)
        .chain(effects.map(|text| Line::from(Span::styled(text, dim))))
        .chain(broken)
        .collect()
}

fn note_lines(note: &Note, mark: &str) -> Vec<Line<'static>> {
    let style = Style::new().fg(if note.fault { Color::Red } else { Color::Cyan });
    let mut lines = note.text.lines();
    let first = format!("{mark}{} {}", clock(note.time), lines.next().unwrap_or_default());
    let rest = lines.map(|line| format!("               {line}"));
    std::iter::once(first).chain(rest).map(|text| Line::from(Span::styled(text, style))).collect()
}

fn waiting_lines(held: &HeldCall, count: usize) -> Text<'static> {
    let more = if count > 1 { format!(" ({count} wait)") } else { String::new() };
    let bold = Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD);
    Text::from(vec![
        Line::from(Span::styled(
            format!(
                "Call {} waits: {}{more}   n send it  c send all  a answer it",
                held.number,
                short(&held.method)
            ),
            bold,
        )),
        Line::from(held.request.to_string()),
        Line::from(held.inspect.clone()),
    ])
}

/// Everything that is known of a row.
fn details(event: &Event) -> Vec<Line<'static>> {
    let call = match event {
        Event::Call(call) => call,
        Event::Note(note) => return note_lines(note, ""),
        Event::Held(held) => return waiting_lines(held, 1).lines,
    };
    let heading =
        |text: &str| Line::from(Span::styled(text.to_owned(), Style::new().add_modifier(Modifier::BOLD)));
    let pretty = |value: &serde_json::Value| serde_json::to_string_pretty(value).unwrap_or_default();
    let mut lines = vec![
        heading(&format!("{} {}  {}  {}", call.number, call.method, call.code, took(call))),
        Line::from(call.message.clone()),
    ];
    for broken in &call.broken {
        let style = Style::new().fg(Color::Red);
        lines.push(Line::from(Span::styled(
            format!("✗ {} ({}): {}", broken.id, broken.level, broken.rule),
            style,
        )));
        lines.push(Line::from(Span::styled(format!("  {}", broken.found), style)));
    }
    let mut section = |name: &str, texts: Vec<String>| {
        if !texts.is_empty() {
            lines.push(heading(name));
            lines.extend(texts.into_iter().map(|text| Line::from(format!("  {text}"))));
        }
    };
    let json = |value: &serde_json::Value| pretty(value).lines().map(str::to_owned).collect();
    section("Faults", call.faults.clone());
    section("Request", json(&call.request));
    if !call.response.is_null() {
        section("Response", json(&call.response));
    }
    section("Effects", call.effects.clone());
    section("Log of the driver", call.log.clone());
    lines
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;
    use crate::lines::tests::call;

    fn key(code: KeyCode) -> KeyEvent {
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    fn drawn(screen: &Screen) -> String {
        let state = State { pid: Some(42), faults: vec!["repeat=2".to_owned()], steps: true };
        let mut terminal = Terminal::new(TestBackend::new(100, 20)).unwrap();
        terminal.draw(|frame| screen.draw(frame, &state)).unwrap();
        let buffer = terminal.backend().buffer();
        let rows = buffer.content().chunks(100);
        rows.map(|row| {
            row.iter().map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned() + "\n"
        })
        .collect()
    }

    fn with_calls(count: u64) -> Screen {
        let mut screen = Screen::new("a.example.com".to_owned());
        for number in 1..=count {
            let record = CallRecord {
                number,
                request: json!({"volume_id": format!("vol-{number}")}),
                ..call("/csi.v1.Node/NodeStageVolume", "OK")
            };
            screen.add(Event::Call(record));
        }
        screen
    }

    #[test]
    fn calls_are_listed_and_shown_in_full() {
        let mut screen = with_calls(60);
        let text = drawn(&screen);
        assert!(text.contains("a.example.com  process 42  no rule broken"), "{text}");
        assert!(text.contains("faults: repeat=2  stepping"), "{text}");
        assert!(text.contains("▶10:20:30.456   60  NodeStageVolume"), "{text}");
        assert!(!text.contains("   40  NodeStageVolume"), "{text}");
        screen.press(key(KeyCode::Up));
        screen.press(key(KeyCode::Enter));
        let text = drawn(&screen);
        assert!(
            text.contains("\"volume_id\": \"vol-59\"") && text.contains("a line of the driver"),
            "{text}"
        );
        screen.press(key(KeyCode::Esc));
        screen.add(Event::Call(CallRecord { number: 61, ..call("/csi.v1.Node/NodeStageVolume", "OK") }));
        assert!(drawn(&screen).contains("▶10:20:30.456   59"), "the chosen row stays chosen");
        screen.press(key(KeyCode::End));
        assert!(drawn(&screen).contains("▶10:20:30.456   61"));
        screen.press(key(KeyCode::Home));
        assert!(drawn(&screen).contains("▶10:20:30.456    1"));
    }

    #[test]
    fn questions_about_the_driver_are_shown_on_demand() {
        let mut screen = with_calls(1);
        screen.add(Event::Call(call("/csi.v1.Identity/Probe", "OK")));
        assert!(!drawn(&screen).contains("Probe"));
        screen.press(key(KeyCode::Char('v')));
        assert!(drawn(&screen).contains("Probe"));
    }

    #[test]
    fn keys_order_things() {
        let mut screen = with_calls(1);
        for (code, order) in [
            (KeyCode::Char('r'), Order::Restart),
            (KeyCode::Char('k'), Order::Kill),
            (KeyCode::Char('2'), Order::Repeat),
            (KeyCode::Char('s'), Order::Step),
            (KeyCode::Char('n'), Order::Next),
            (KeyCode::Char('c'), Order::Continue),
            (KeyCode::Char('q'), Order::Quit),
        ] {
            assert_eq!(screen.press(key(code)), Some(order));
        }
        assert_eq!(screen.press(key(KeyCode::Char('a'))), None, "no call waits");
        screen.press(key(KeyCode::Char('f')));
        for c in "delay=1sx".chars() {
            assert_eq!(screen.press(key(KeyCode::Char(c))), None);
        }
        screen.press(key(KeyCode::Backspace));
        assert!(drawn(&screen).contains("fault (empty: none): delay=1s"));
        assert_eq!(screen.press(key(KeyCode::Enter)), Some(Order::Fault("delay=1s".to_owned())));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.press(control_c), Some(Order::Quit));
    }

    #[test]
    fn a_call_that_waits_can_be_answered() {
        let mut screen = with_calls(1);
        let held = HeldCall {
            number: 2,
            method: "/csi.v1.Node/NodePublishVolume".to_owned(),
            request: json!({"target_path": "/x"}),
            inspect: "ls -la /x".to_owned(),
        };
        screen.add(Event::Held(held));
        let text = drawn(&screen);
        assert!(text.contains("Call 2 waits: NodePublishVolume") && text.contains("ls -la /x"), "{text}");
        screen.press(key(KeyCode::Char('a')));
        screen.press(key(KeyCode::Char('O')));
        screen.press(key(KeyCode::Char('K')));
        assert_eq!(screen.press(key(KeyCode::Enter)), Some(Order::Answer("OK".to_owned())));
        screen.add(Event::Call(CallRecord { number: 2, ..call("/csi.v1.Node/NodePublishVolume", "OK") }));
        assert!(!drawn(&screen).contains("waits"));
    }

    #[test]
    fn broken_rules_are_counted() {
        let mut screen = with_calls(1);
        screen.add(Event::Note(Note {
            time: "2026-01-01T00:00:00Z".parse().unwrap(),
            text: "✗ The driver ended\nwhy".to_owned(),
            fault: true,
        }));
        let text = drawn(&screen);
        assert!(text.contains("✗ 1") && text.contains("The driver ended") && text.contains("why"), "{text}");
    }
}
