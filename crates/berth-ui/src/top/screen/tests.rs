//! The screen, drawn into memory.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::listing::tests::cluster;
use super::*;
use crate::calls::CallCounts;

struct Shown {
    screen: Screen,
    terminal: Terminal<TestBackend>,
    figures: Figures,
}

impl Shown {
    fn new(width: u16, height: u16) -> Self {
        Self {
            screen: Screen::new(Arrangement::default()),
            terminal: Terminal::new(TestBackend::new(width, height)).unwrap(),
            figures: Figures::of(&cluster(), &CallCounts::follow(None)),
        }
    }

    /// What the terminal shows after these keys.
    fn after(&mut self, keys: &[KeyCode]) -> String {
        for key in keys {
            let event = Event::Key(KeyEvent::new(*key, KeyModifiers::NONE));
            assert_eq!(self.screen.take(&event), Next::Draw);
            self.draw();
        }
        self.draw()
    }

    fn draw(&mut self) -> String {
        let header = Header { cluster: "test", lost: None };
        let (screen, figures) = (&mut self.screen, &self.figures);
        self.terminal.draw(|frame| screen.draw(frame, &header, figures)).unwrap();
        self.terminal.backend().to_string()
    }

    fn typed(text: &str) -> Vec<KeyCode> {
        text.chars().map(KeyCode::Char).collect()
    }
}

#[test]
fn the_selected_line_shows_its_verdict_and_the_command_that_helps() {
    let mut shown = Shown::new(110, 24);
    let screen = shown.after(&[]);
    for part in ["berth top  test", "01:00:00 UTC", "2 things need attention", "◆ No such class", "█", "98 %"]
    {
        assert!(screen.contains(part), "{part} is missing in\n{screen}");
    }
    assert!(screen.contains("names the class gone"), "{screen}");
    let screen = shown.after(&[KeyCode::Down]);
    assert!(screen.contains("The volume of the claim is 98 % full (bytes)."), "{screen}");
    let screen = shown.after(&[KeyCode::Up, KeyCode::Enter]);
    assert!(screen.contains("$ kubectl get sc"), "{screen}");
}

#[test]
fn keys_choose_filter_sort_and_view() {
    let mut shown = Shown::new(110, 24);
    let screen = shown.after(&[&[KeyCode::Char('/')][..], &Shown::typed("calm")].concat());
    assert!(screen.contains("Filter: calm") && screen.contains("1 of 3"), "{screen}");
    assert!(!screen.contains("shop/stuck"), "{screen}");
    let screen = shown.after(&[KeyCode::Esc]);
    assert!(screen.contains("shop/stuck"), "{screen}");
    let screen = shown.after(&[KeyCode::Char('s')]);
    assert!(screen.contains("CLAIM ↓"), "{screen}");
    let screen = shown.after(&[KeyCode::Char('r')]);
    assert!(screen.contains("CLAIM ↑"), "{screen}");
    let screen = shown.after(&[KeyCode::Char('a')]);
    assert!(!screen.contains("shop/calm") && screen.contains("only what needs attention"), "{screen}");
    let screen = shown.after(&[KeyCode::Char('3')]);
    assert!(screen.contains("a.csi (2 of 9)"), "{screen}");
    let screen = shown.after(&[KeyCode::Tab]);
    assert!(screen.contains("DRIVER"), "{screen}");
    let screen = shown.after(&[KeyCode::Char('?')]);
    assert!(screen.contains("turn the order around"), "{screen}");
    let screen = shown.after(&[KeyCode::Char('x')]);
    assert!(!screen.contains("turn the order around"), "{screen}");
}

#[test]
fn a_letter_of_a_filter_does_not_quit_and_q_does() {
    let mut shown = Shown::new(80, 24);
    shown.after(&[&[KeyCode::Char('/')][..], &Shown::typed("quit"), &[KeyCode::Enter]].concat());
    let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
    assert_eq!(shown.screen.take(&key(KeyCode::Char('q'), KeyModifiers::NONE)), Next::End);
    assert_eq!(shown.screen.take(&key(KeyCode::Char('c'), KeyModifiers::CONTROL)), Next::End);
}

#[test]
fn a_window_of_any_size_can_be_drawn_and_the_selection_stays_in_sight() {
    for (width, height) in [(1, 1), (10, 3), (40, 8), (200, 60)] {
        let mut shown = Shown::new(width, height);
        shown.after(&[KeyCode::End, KeyCode::Enter, KeyCode::Char('2'), KeyCode::Char('?')]);
    }
    let mut shown = Shown::new(80, 10);
    shown.draw();
    let screen = shown.after(&[KeyCode::End]);
    assert!(screen.contains("shop/calm"), "{screen}");
}
