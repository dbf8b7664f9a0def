//! Log lines on standard error, for people or for machines.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// How to log.
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

/// Starts logging; called once, before anything that logs.
pub(crate) fn start(args: &Logging) {
    let filter = match args.verbosity {
        Some(8..) => "trace,h2=info,hyper=info",
        Some(5..) => "debug,h2=info,hyper=info",
        _ => &args.log,
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    if args.log_json {
        builder.json().flatten_event(true).init();
    } else {
        builder.init();
    }
}
