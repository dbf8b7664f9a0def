//! `berth top`: the storage of any cluster in the terminal.

use std::io::{IsTerminal as _, Write as _};

use anyhow::{Context as _, bail};
use berth_ui::top::{self, Arrangement, Options, View};
use clap::Args as ClapArgs;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::machine::ClusterArgs;

/// Show the storage of a cluster in the terminal: what is full, what is stuck and why, calls per second.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Keys: 1 to 4 or Tab choose the view, arrows a line, Enter shows more of it, s and r sort, / filters, a shows only what needs \
                        attention, ? lists all, q quits."
)]
pub(crate) struct Args {
    /// Print one view once, as plain text; also done if the output is no terminal
    #[arg(long)]
    once: bool,

    /// What to show first
    #[arg(long, value_enum, default_value_t = Shown::Volumes)]
    view: Shown,

    /// The column to sort by, such as `used` [default: the worst first]
    #[arg(long, value_name = "COLUMN")]
    sort: Option<String>,

    /// Turn the order around
    #[arg(long)]
    reverse: bool,

    /// Show only lines that have all these words
    #[arg(long, value_name = "WORDS")]
    filter: Option<String>,

    /// Show only what needs attention
    #[arg(long)]
    attention: bool,

    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Shown {
    Volumes,
    Attention,
    Nodes,
    Drivers,
}

/// Shows the cluster until somebody quits, or prints it once.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let view = match args.view {
        Shown::Volumes => View::Volumes,
        Shown::Attention => View::Attention,
        Shown::Nodes => View::Nodes,
        Shown::Drivers => View::Drivers,
    };
    let sort = args.sort.unwrap_or_default();
    let columns = view.columns();
    if !sort.is_empty() && !columns.iter().any(|name| name.eq_ignore_ascii_case(&sort)) {
        bail!("--sort: {sort:?} is no column of the view; it has {}", columns.join(", ").to_lowercase());
    }
    let (cluster, records) = args.cluster.connect().await?;
    let arrangement = Arrangement {
        view,
        sort,
        reverse: args.reverse,
        filter: args.filter.unwrap_or_default(),
        stuck: args.attention,
    };
    let options = Options { name: args.cluster.name(), records, arrangement };
    let mut out = std::io::stdout();
    if args.once || !out.is_terminal() {
        let text = top::once(&cluster, &options).await.context("read the cluster")?;
        out.write_all(text.as_bytes())?;
        return Ok(());
    }
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let until = shutdown.clone();
    tokio::spawn(async move {
        terminate.recv().await;
        until.cancel();
    });
    top::run(&cluster, options, shutdown).await.map_err(anyhow::Error::from)
}
