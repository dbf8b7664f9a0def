//! `berth top` in a real terminal, on a machine with a healthy, a full and a stuck volume; and its plain form.

use anyhow::{Result, ensure};
use berth_e2e::terminal::Terminal;
use berth_e2e::up::Machine;

use super::{claim, pod, says, together};

#[test]
fn top_shows_usage_and_what_is_stuck_and_takes_keys() -> Result<()> {
    let machine = Machine::start()?;
    let stuck = claim("stuck").replace("spec:\n", "spec:\n  storageClassName: absent\n");
    let pods = [pod("writer", "data", "sleep 1000000"), pod("filler", "full", "sleep 1000000")].join("---\n");
    machine.apply(&together(&[claim("data"), claim("full"), stuck, pods]))?;
    machine.ready("writer")?;
    machine.ready("filler")?;
    // It ends when there is no room left.
    machine.kubectl(&["exec", "filler", "--", "sh", "-c", "cat /dev/zero > /data/file; sync; true"])?;

    let plain = machine.says(&["top", "--once"])?;
    for part in ["2 things need attention; 3 claims, 2 bound", "1 of 1 node ready", "calls/s", "default/data"]
    {
        says(&plain, part)?;
    }
    let line = |name: &str| plain.lines().position(|line| line.contains(name));
    ensure!(
        line("default/stuck") < line("default/full") && line("default/full") < line("default/data"),
        "{plain}"
    );
    ensure!(!plain.contains('\u{1b}'), "{plain:?}");
    says(&machine.says(&["top", "--once", "--view=drivers"])?, "local.berth.dev")?;
    let filtered = machine.says(&["top", "--once", "--filter", "stuck", "--sort=used"])?;
    ensure!(filtered.lines().count() == 3, "{filtered}");
    says(&machine.refuses(&["top", "--once", "--sort=colour"])?, "--sort: \"colour\" is no column")?;

    let terminal = Terminal::start(&machine.command(&["top"]), 120, 30)?;
    terminal.shows("◆ No such class")?;
    let screen = terminal.until("measures the full volume", |screen| screen.contains("% full"))?;
    for part in ["berth top", "calls/s", "1 of 1 node ready", "default/data", "█", "$ kubectl get sc"] {
        says(&screen, part)?;
    }
    // What is new comes by itself.
    machine.apply(&claim("later"))?;
    terminal.shows("default/later")?;
    terminal.press(&["/", "w", "r", "i", "t", "e", "r"])?;
    terminal.until("is filtered", |screen| screen.contains("1 of 4") && !screen.contains("default/full"))?;
    terminal.press(&["Escape"])?;
    terminal.shows("default/full")?;
    terminal.press(&["s"])?;
    terminal.shows("CLAIM ↓")?;
    terminal.press(&["a"])?;
    terminal.until("shows only trouble", |screen| {
        !screen.contains("default/data") && screen.contains("2 of 4")
    })?;
    terminal.press(&["3"])?;
    terminal.shows("local.berth.dev (2")?;
    terminal.press(&["4"])?;
    terminal.shows("CALLS/H")?;
    terminal.press(&["1"])?;
    terminal.resize(60, 15)?;
    terminal.until("fits a small window", |screen| {
        screen.contains("default/stuck") && screen.lines().all(|line| line.chars().count() <= 60)
    })?;
    terminal.press(&["q"])?;
    // The terminal is as it was before.
    let left = terminal.shows("ended with 0")?;
    ensure!(!left.contains("berth top"), "{left}");
    drop(terminal);
    machine.finish()
}
