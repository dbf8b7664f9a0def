//! `berth top`: the storage of any cluster in the terminal, by the same watches and the same diagnosis as the page.
//!
//! ```text
//!  WatchedCluster ──change, every second──▶ ClusterState ──▶ listing::Figures ──▶ screen::Screen ──▶ the terminal
//!  keys ──────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! What is shown are four listings ([`View`]) of the same shape: columns, lines, and for each line the sentences of its verdict. Sorting,
//! filtering, drawing and the plain text of `--once` are written once for all of them (`listing.rs`, `screen.rs`).

mod listing;
mod screen;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::Cluster;
use parking_lot::Mutex;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use self::listing::Figures;
pub use self::listing::{Arrangement, View};
use self::screen::{Header, Screen};
use crate::calls::CallCounts;
use crate::state::ClusterState;
use crate::watched::WatchedCluster;

/// How often the figures are renewed without a change: ages, and calls per second.
const TICK: Duration = Duration::from_secs(1);

/// What is shown, and where the rest of it is found.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the first line calls the cluster.
    pub name: String,
    /// Where `berth up` keeps the calls of this cluster, if this machine runs it.
    pub records: Option<PathBuf>,
    /// What is shown at first.
    pub arrangement: Arrangement,
}

/// One view as plain text, for pipes: the whole cluster is read once.
pub async fn once(cluster: &Cluster, options: &Options) -> berth_kube::Result<String> {
    let mut state = ClusterState::read(cluster, None).await?;
    state.measure(cluster).await;
    let mut calls = CallCounts::follow(options.records.as_deref());
    calls.read_on();
    let figures = Figures::of(&state, &calls);
    Ok(listing::text(&figures, &options.arrangement))
}

/// Shows a cluster until the person at the terminal ends it, or the shutdown comes.
pub async fn run(cluster: &Cluster, options: Options, shutdown: CancellationToken) -> Result<(), Error> {
    let watched = Arc::new(WatchedCluster::new(cluster, true).await.map_err(Error::Cluster)?);
    let mut terminal = ratatui::try_init().map_err(Error::Terminal)?;
    let shown = show(&mut terminal, &watched, options, shutdown).await;
    let restored = ratatui::try_restore();
    shown.and(restored).map_err(Error::Terminal)
}

/// Why nothing is shown.
#[derive(Debug)]
pub enum Error {
    /// The API server does not answer.
    Cluster(berth_kube::Error),
    /// The terminal cannot be used.
    Terminal(io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cluster(_) => "cannot read the cluster",
            Self::Terminal(_) => "cannot use this terminal; `berth top --once` needs none",
        })
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match self {
            Self::Cluster(error) => error,
            Self::Terminal(error) => error,
        })
    }
}

/// What the lists that are not complete hold so far, or the figures.
#[derive(Clone)]
enum Content {
    Loading(Vec<(String, bool, usize)>),
    Figures(Arc<Figures>),
}

async fn show(
    terminal: &mut DefaultTerminal,
    watched: &Arc<WatchedCluster>,
    options: Options,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let (to, mut content) = watch::channel(Content::Loading(Vec::new()));
    let mut keys = keys();
    let watching = tokio::spawn(follow(watched.clone(), options.records.clone(), to));
    let mut screen = Screen::new(options.arrangement);
    let ended = loop {
        let now = content.borrow_and_update().clone();
        let header = Header { cluster: &options.name, lost: watched.lost() };
        let drawn = match &now {
            Content::Loading(progress) => {
                terminal.draw(|frame| screen::draw_loading(frame, &header, progress))
            }
            Content::Figures(figures) => terminal.draw(|frame| screen.draw(frame, &header, figures)),
        };
        if let Err(error) = drawn {
            break Err(error);
        }
        tokio::select! {
            changed = content.changed() => if changed.is_err() { break Ok(()) },
            input = keys.recv() => match input {
                Some(Ok(event)) => if screen.take(&event) == screen::Next::End { break Ok(()) },
                Some(Err(error)) => break Err(error),
                None => break Ok(()),
            },
            () = shutdown.cancelled() => break Ok(()),
        }
    };
    watching.abort();
    ended
}

/// Renews the figures while somebody takes them.
async fn follow(watched: Arc<WatchedCluster>, records: Option<PathBuf>, to: watch::Sender<Content>) {
    let progress = |lists| {
        to.send_replace(Content::Loading(lists));
    };
    watched.resume(progress).await;
    let calls = Mutex::new(CallCounts::follow(records.as_deref()));
    let of = watched.clone();
    let refresh = move || {
        let mut calls = calls.lock();
        calls.read_on();
        to.send_replace(Content::Figures(Arc::new(Figures::of(&of.state(), &calls))));
    };
    watched.follow(TICK, refresh).await;
}

/// What is typed, and changes of the window. The thread waits for the terminal and ends with the process.
fn keys() -> mpsc::UnboundedReceiver<io::Result<event::Event>> {
    let (to, keys) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        loop {
            let read = event::read();
            let failed = read.is_err();
            if to.send(read).is_err() || failed {
                return;
            }
        }
    });
    keys
}
