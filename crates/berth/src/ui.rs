//! `berth ui` and `berth replay`: the web page of any cluster or of a recording; and the page of `berth up`.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use berth_host::path::Dir;
use berth_kube::Cluster;
use berth_ui::page::{Options, Page, Recording, Token};
use clap::Args as ClapArgs;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::logging;
use crate::machine::{ClusterArgs, Running};

/// Where the page listens if nobody says otherwise and the port is free.
const PORT: u16 = 6444;
/// Kept in the data directory, for its owner alone: the token and port that a page which is open goes on with after a restart.
const KEPT: &str = "ui.json";

/// Show the storage of a cluster in the browser: what is full, what is stuck and why.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Where the page listens: a loopback address [default: 127.0.0.1:6444, or a free port]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,

    /// Let viewers expand, snapshot, clone and delete claims, with the rights of the kubeconfig
    #[arg(long)]
    allow_actions: bool,

    #[command(flatten)]
    cluster: ClusterArgs,

    #[command(flatten)]
    logging: logging::Logging,
}

/// Show a recording of `berth up --record` in the browser.
#[derive(Debug, ClapArgs)]
pub(crate) struct ReplayArgs {
    /// The directory of the recording
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// Where the page listens: a loopback address [default: 127.0.0.1:6444, or a free port]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
}

/// The flags of `berth up` for its page.
#[derive(Debug, Clone, ClapArgs)]
#[command(next_help_heading = "The web page")]
pub(crate) struct UpArgs {
    /// Serve a web page that shows the storage of this machine
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true, value_name = "BOOL")]
    ui: bool,

    /// Where the page listens: a loopback address [default: 127.0.0.1:6444, or a free port]
    #[arg(long, value_name = "ADDRESS")]
    ui_listen: Option<SocketAddr>,

    /// Let viewers of the page expand, snapshot, clone and delete claims
    #[arg(long)]
    ui_allow_actions: bool,
}

/// What is kept of a page for the next start.
#[derive(Serialize, Deserialize)]
struct Kept {
    token: String,
    address: SocketAddr,
}

/// Serves the page of a cluster until SIGTERM or SIGINT.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    logging::start(&args.logging.quieter("warn"));
    let (cluster, records) = args.cluster.connect().await?;
    let listener = listen(args.listen, None).await?;
    let user = if args.allow_actions { who(&cluster).await } else { String::new() };
    let options = Options {
        name: args.cluster.name(),
        token: Token::random(),
        allow_actions: args.allow_actions,
        user,
        records,
    };
    let token = options.token.clone();
    let page = Page::watch(&cluster, options, true).await.context("read the cluster")?;
    serve(page, listener, &token).await
}

/// Serves the page of a recording until SIGTERM or SIGINT.
pub(crate) async fn replay(args: ReplayArgs) -> anyhow::Result<()> {
    let directory = args.directory;
    let recording = Recording::read(&directory)
        .with_context(|| format!("{} holds no recording of `berth up --record`", directory.display()))?;
    println!(
        "{} revisions of objects, {} steps, {} calls",
        recording.revisions, recording.steps, recording.calls
    );
    let listener = listen(args.listen, None).await?;
    let name = directory
        .file_name()
        .map_or_else(|| "recording".to_owned(), |name| name.to_string_lossy().into_owned());
    let token = Token::random();
    let options = Options {
        name,
        token: token.clone(),
        allow_actions: false,
        user: String::new(),
        records: Some(directory),
    };
    serve(Page::recorded(recording, options), listener, &token).await
}

async fn serve(page: Page, listener: TcpListener, token: &Token) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    println!("{}", Page::link(listener.local_addr()?, token));
    std::io::stdout().flush()?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let until = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        until.cancel();
    });
    page.serve(listener, shutdown).await.context("serve the page")
}

/// The page of `berth up`, once it listens.
pub(crate) struct Started {
    page: Page,
    listener: TcpListener,
}

impl UpArgs {
    /// The flags of a machine that serves no page.
    pub(crate) fn off() -> Self {
        Self { ui: false, ui_listen: None, ui_allow_actions: false }
    }

    /// Starts the page of `berth up` in a data directory, unless it is not wanted. It listens, and is served by [`Started::run`].
    pub(crate) async fn start(
        &self,
        data: &Dir,
        cluster: &Cluster,
        running: &mut Running,
    ) -> anyhow::Result<Option<Started>> {
        if !self.ui {
            data.remove_written(KEPT).context("remove the token of an earlier page")?;
            return Ok(None);
        }
        let kept = kept(data.path());
        let listener = listen(self.ui_listen, kept.as_ref().map(|kept| kept.address.port())).await?;
        let address = listener.local_addr()?;
        running.ui = Some(address);
        // A page that is open goes on after a restart.
        let token = kept.and_then(|kept| Token::parse(&kept.token)).unwrap_or_else(Token::random);
        let keep = Kept { token: token.text().to_owned(), address };
        data.write_atomically(KEPT, &serde_json::to_vec(&keep)?).context("keep the token of the page")?;
        let options = Options {
            name: running.node.clone(),
            token,
            allow_actions: self.ui_allow_actions,
            user: "the administrator of this machine".to_owned(),
            records: Some(data.path().to_owned()),
        };
        let page = Page::watch(cluster, options, false).await.context("start the page")?;
        Ok(Some(Started { page, listener }))
    }
}

impl Started {
    /// Serves the page until the shutdown.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        if let Err(error) = self.page.serve(self.listener, shutdown).await {
            tracing::error!("the page is not served any more: {error}");
        }
    }
}

fn kept(data_dir: &Path) -> Option<Kept> {
    serde_json::from_slice(&std::fs::read(data_dir.join(KEPT)).ok()?).ok()
}

/// The link to the page of `berth up` that runs in a data directory, with its token.
pub(crate) fn link(data_dir: &Path, address: SocketAddr) -> Option<String> {
    Some(Page::link(address, &Token::parse(&kept(data_dir)?.token)?))
}

/// Listens where it is asked for, on a loopback address; else where it was before, on the usual port, or on any.
async fn listen(asked: Option<SocketAddr>, before: Option<u16>) -> anyhow::Result<TcpListener> {
    if let Some(asked) = asked {
        if !asked.ip().is_loopback() {
            bail!(
                "the page has no TLS, so it listens on a loopback address only, not on {asked}: reach it by `ssh -L` or `kubectl port-forward`"
            );
        }
        return TcpListener::bind(asked).await.with_context(|| format!("listen on {asked}"));
    }
    let here = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    for port in before.into_iter().chain([PORT]) {
        if let Ok(listener) = TcpListener::bind(here(port)).await {
            return Ok(listener);
        }
    }
    TcpListener::bind(here(0)).await.context("listen on a free port")
}

/// As whom the API server knows this kubeconfig.
async fn who(cluster: &Cluster) -> String {
    let reviews = kube::Api::<SelfSubjectReview>::all(cluster.client().clone());
    let answer = reviews.create(&kube::api::PostParams::default(), &SelfSubjectReview::default()).await.ok();
    let name = answer.and_then(|answer| answer.status?.user_info?.username);
    name.unwrap_or_else(|| "the user of the kubeconfig".to_owned())
}
