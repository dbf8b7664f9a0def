//! Log lines on standard error, for people or for machines; and the volumes' timelines.

use std::io::IsTerminal as _;

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::timeline::TimelineRecorder;

/// The flags that say what is logged, and in which form.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct Logging {
    /// What to log: error, warn, info, debug, trace, or per module, such as berth_csi=debug
    #[arg(long, env = "BERTH_LOG", default_value = "info", value_name = "FILTER")]
    log: String,

    /// One JSON object per line
    #[arg(long)]
    log_json: bool,

    /// Go's log level: 5 and above is debug, 8 and above is trace
    #[arg(short = 'v', long = "v", value_name = "LEVEL", hide = true)]
    verbosity: Option<u8>,
}

impl Logging {
    /// As the flags of Go's programs say it; the environment's filter counts too.
    pub(crate) fn in_go_terms(verbosity: Option<u8>, json: bool) -> Self {
        let log = std::env::var("BERTH_LOG").unwrap_or_else(|_| "info".to_owned());
        Self { log, log_json: json, verbosity }
    }

    /// One JSON object per line, if that is asked for in another way than by the flag.
    pub(crate) fn use_json(&mut self, json: bool) {
        self.log_json |= json;
    }

    /// Logs only what matches this filter, unless the caller or the environment says otherwise.
    pub(crate) fn quieter(mut self, filter: &str) -> Self {
        if self.log == "info" && self.verbosity.is_none() {
            filter.clone_into(&mut self.log);
        }
        self
    }
}

/// Starts logging; called once, before anything that logs. The steps of volumes go to the keeper that it returns.
pub(crate) fn start(args: &Logging) -> TimelineRecorder {
    let (subscriber, keeper) = subscriber(args, false);
    subscriber.init();
    keeper
}

/// As [`start`]; the keeper also gets CSI calls in full.
pub(crate) fn start_with_calls(args: &Logging) -> TimelineRecorder {
    let (subscriber, keeper) = subscriber(args, true);
    subscriber.init();
    keeper
}

fn subscriber(args: &Logging, calls: bool) -> (impl tracing::Subscriber + Send + Sync, TimelineRecorder) {
    let filter = match args.verbosity {
        Some(8..) => "trace,h2=info,hyper=info",
        Some(5..) => "debug,h2=info,hyper=info",
        _ => &args.log,
    };
    // Steps go to the keeper, not to the log.
    let filter = EnvFilter::new(format!("{filter},{}=off", berth_kube::timeline::TARGET));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    let lines = if args.log_json { lines.json().flatten_event(true).boxed() } else { lines.boxed() };
    let keeper = TimelineRecorder::new();
    let steps = tracing_subscriber::filter::filter_fn(move |metadata| {
        metadata.target() == berth_kube::timeline::TARGET
            || (calls && metadata.target() == berth_csi::full::TARGET)
    });
    let subscriber = tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(keeper.clone().with_filter(steps));
    (subscriber, keeper)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_kept_however_little_is_logged() {
        for log in ["error", "warn,berth_csi=error", "info", "off"] {
            let args = Logging { log: log.to_owned(), log_json: false, verbosity: None };
            let (subscriber, keeper) = subscriber(&args, false);
            let mut steps = keeper.listen();
            tracing::subscriber::with_default(subscriber, || {
                berth_kube::timeline::Step { call: "CreateVolume", ..Default::default() }.emit();
            });
            let step = steps.try_recv().unwrap_or_else(|error| panic!("with {log}: {error}"));
            assert_eq!(step.call, "CreateVolume");
        }
    }
}
