//! The flags that the external components share, as upstream's take them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_core::Backoff;
use berth_csi::{Endpoint, Tls};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, parser::ValueSource};

use super::go;
use crate::logging::{self, Logging};

/// Where the driver is.
#[derive(Debug, Clone, Args)]
pub(crate) struct Connection {
    /// The CSI driver's socket: a path, unix:///path or tcp://host:port
    #[arg(long, default_value = "/run/csi/socket", value_name = "ADDRESS")]
    csi_address: Endpoint,

    #[command(flatten)]
    tls: CsiTls,
}

impl Connection {
    /// The driver's endpoint, with TLS if files are given.
    pub(crate) fn endpoint(&self) -> anyhow::Result<Endpoint> {
        self.tls.apply(self.csi_address.clone())
    }
}

/// The files for TLS over tcp://, which driver and sidecars take by the same flags.
#[derive(Debug, Clone, Args)]
#[expect(clippy::struct_field_names, reason = "fields are named as the flags are")]
pub(crate) struct CsiTls {
    /// For tcp://: the certificate that is shown to the other side, in PEM format
    #[arg(long, value_name = "FILE", requires = "csi_tls_key_file")]
    csi_tls_cert_file: Option<PathBuf>,

    /// For tcp://: the key of the certificate
    #[arg(long, value_name = "FILE", requires = "csi_tls_ca_file")]
    csi_tls_key_file: Option<PathBuf>,

    /// For tcp://: the authority that must have signed the other side's certificate
    #[arg(long, value_name = "FILE", requires = "csi_tls_cert_file")]
    csi_tls_ca_file: Option<PathBuf>,
}

impl CsiTls {
    /// The endpoint with TLS, if files are given.
    pub(crate) fn apply(&self, endpoint: Endpoint) -> anyhow::Result<Endpoint> {
        let (Some(certificate), Some(key), Some(authority)) =
            (&self.csi_tls_cert_file, &self.csi_tls_key_file, &self.csi_tls_ca_file)
        else {
            return Ok(endpoint);
        };
        let tls = Tls::read(certificate, key, authority).context("prepare TLS for CSI calls")?;
        endpoint.with_tls(tls).context("--csi-tls-cert-file has no effect")
    }
}

/// The flags that name the cluster.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Kube {
    /// The cluster's kubeconfig [default: KUBECONFIG, else the pod's service account]
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// The address of the API server, if not the kubeconfig's
    #[arg(long, value_name = "URL")]
    pub(crate) master: Option<String>,

    /// Features to switch, as A=true,B=false
    #[arg(long, default_value = "", value_parser = go::gates, value_name = "GATES", hide = true)]
    pub(crate) feature_gates: go::Gates,
}

/// Who works when there are several.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Leader election")]
#[expect(clippy::struct_field_names, reason = "fields are named as the flags are")]
pub(crate) struct Election {
    /// Work only while holding a Lease, so that several replicas can run
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub(crate) leader_election: bool,

    /// The Lease's namespace [default: POD_NAMESPACE, else the service account's, else default]
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAME")]
    pub(crate) leader_election_namespace: String,

    /// How long others wait for a leader that is silent
    #[arg(long, default_value = "15s", value_parser = go::positive_duration, value_name = "DURATION")]
    pub(crate) leader_election_lease_duration: Duration,

    /// How long a leader tries to renew before it stops working
    #[arg(long, default_value = "10s", value_parser = go::positive_duration, value_name = "DURATION")]
    pub(crate) leader_election_renew_deadline: Duration,

    /// How often a leader renews the Lease, and candidates try to acquire it
    #[arg(long, default_value = "5s", value_parser = go::positive_duration, value_name = "DURATION")]
    pub(crate) leader_election_retry_period: Duration,

    /// Labels of the Lease, as key:value,key:value
    #[arg(long, default_value = "", hide_default_value = true, value_parser = go::labels, value_name = "LABELS")]
    pub(crate) leader_election_labels: go::Labels,
}

/// What is served over HTTP.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Health and metrics")]
#[expect(clippy::struct_field_names, reason = "fields are named as the flags are")]
pub(crate) struct Http {
    /// Serve health and metrics here, such as :8080
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ADDRESS")]
    pub(crate) http_endpoint: String,

    /// The path of the metrics
    #[arg(long, default_value = "/metrics", value_name = "PATH")]
    pub(crate) metrics_path: String,

    /// Deprecated: use --http-endpoint instead
    #[arg(long, default_value = "", hide = true)]
    pub(crate) metrics_address: String,
}

impl Http {
    /// The address to serve on, if any; a deprecated flag is logged.
    pub(crate) fn address(&self) -> anyhow::Result<Option<&str>> {
        if !self.metrics_path.starts_with('/') {
            bail!("--metrics-path must begin with a slash, not be {:?}", self.metrics_path);
        }
        match (self.http_endpoint.as_str(), self.metrics_address.as_str()) {
            ("", "") => Ok(None),
            (address, "") => Ok(Some(address)),
            ("", address) => {
                tracing::warn!("--metrics-address is deprecated; use --http-endpoint");
                Ok(Some(address))
            }
            _ => bail!(
                "--http-endpoint and the deprecated --metrics-address exclude each other; drop the latter"
            ),
        }
    }
}

/// How much is done at a time, and when again.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sidecars")]
pub(crate) struct Work {
    /// How long one call of the driver may take [default: 10s; attacher and health monitor 15s; snapshotter 1m]
    #[arg(long, value_parser = go::positive_duration, value_name = "DURATION")]
    pub(crate) timeout: Option<Duration>,

    /// How many objects of a kind are worked on at a time [default: 10; provisioner 100]
    #[arg(long, alias = "workers", value_parser = go::workers, value_name = "COUNT")]
    pub(crate) worker_threads: Option<usize>,

    /// How long to wait after the first failure; twice as long after each further one
    #[arg(long, default_value = "1s", value_parser = go::positive_duration, value_name = "DURATION")]
    retry_interval_start: Duration,

    /// The longest wait between two attempts
    #[arg(long, default_value = "5m", value_parser = go::positive_duration, value_name = "DURATION")]
    retry_interval_max: Duration,
}

impl Work {
    pub(crate) fn retry(&self) -> anyhow::Result<Backoff> {
        let (first, longest) = (self.retry_interval_start, self.retry_interval_max);
        if first > longest {
            bail!("--retry-interval-start ({first:?}) is longer than --retry-interval-max ({longest:?})");
        }
        Ok(Backoff { first, longest })
    }
}

/// The filesystem of volumes.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sidecars")]
pub(crate) struct Filesystem {
    /// The filesystem of volumes that name none
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FSTYPE")]
    pub(crate) default_fstype: String,
}

/// The names of Kubernetes objects that are passed to the driver.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sidecars")]
pub(crate) struct Metadata {
    /// Give the objects' names to the driver as parameters when creating, and the labels and annotations of the claim
    /// that the class's parameters ask for, as `${pvc.metadata.labels['KEY']}`
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub(crate) extra_create_metadata: bool,
}

/// What a restore may do.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sidecars")]
pub(crate) struct Conversion {
    /// Refuse a restore that changes the volume mode, unless the content allows it
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub(crate) prevent_volume_mode_conversion: bool,
}

/// One sidecar per node instead of one per cluster. [`crate::launch::Setting`] reads it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sidecars")]
pub(crate) struct NodeDeployment {
    /// Run on every node, and work only on what is there; needs the environment variable NODE_NAME
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    pub(crate) node_deployment: bool,
}

/// How to log, in Go's words.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct Klog {
    /// How much to log: 5 and above is debug, 8 and above is trace
    #[arg(short = 'v', long = "v", value_name = "LEVEL")]
    verbosity: Option<u8>,

    /// The format of the log: text or json
    #[arg(long, default_value = "text", value_parser = ["text", "json"], value_name = "FORMAT")]
    logging_format: String,

    #[command(flatten)]
    accepted: Accepted,
}

impl Klog {
    /// Starts logging, and logs which of the given flags have no effect here.
    pub(crate) fn start(&self) {
        logging::start(&Logging::in_go_terms(self.verbosity, self.logging_format == "json"));
        for (flag, why) in &self.accepted.given {
            tracing::warn!("--{flag} has no effect here: {why}");
        }
    }
}

/// Upstream flags that are taken and mean nothing here.
#[derive(Debug, Clone, Default)]
struct Accepted {
    given: Vec<(&'static str, &'static str)>,
}

const NO_GO: &str = "there is no Go runtime";
const NO_BUFFER: &str = "log lines are written at once";
const NO_RESYNC: &str = "there is no resync: objects are synced when they change";
const NO_LIMIT: &str = "requests are not limited, but a Retry-After of the server is obeyed";
const NO_POOL: &str = "there is no pool of workers for this";
const DEPRECATED: &str = "it is deprecated";

/// Each with whether it is a switch, and why it means nothing.
const ACCEPTED: &[(&str, bool, &str)] = &[
    ("automaxprocs", true, NO_GO),
    ("enable-pprof", true, NO_GO),
    ("vmodule", false, "use BERTH_LOG to log single modules"),
    ("log-flush-frequency", false, NO_BUFFER),
    ("log-text-split-stream", true, NO_BUFFER),
    ("log-text-info-buffer-size", false, NO_BUFFER),
    ("log-json-split-stream", true, NO_BUFFER),
    ("log-json-info-buffer-size", false, NO_BUFFER),
    ("logtostderr", true, "the log always goes to standard error"),
    ("kube-api-qps", false, NO_LIMIT),
    ("kube-api-burst", false, NO_LIMIT),
    ("kube-api-capacity-qps", false, NO_LIMIT),
    ("kube-api-capacity-burst", false, NO_LIMIT),
    ("resync", false, NO_RESYNC),
    ("resync-period", false, NO_RESYNC),
    ("volume-list-add-interval", false, NO_RESYNC),
    ("node-list-add-interval", false, NO_RESYNC),
    ("max-grpc-log-length", false, "a call is logged in one line, without its messages"),
    ("cloning-protection-threads", false, NO_POOL),
    ("snapshot-orphan-sweep-interval", false, NO_RESYNC),
    ("retry-crd-interval-max", false, "missing kinds are waited for"),
    ("connection-timeout", false, DEPRECATED),
    ("provisioner", false, "the driver says its name itself"),
    ("dummy", true, DEPRECATED),
    ("driver-requires-attachment", true, "the CSIDriver object says it"),
    ("pod-info-mount-version", false, "the CSIDriver object says it"),
];

impl Args for Accepted {
    fn augment_args(command: Command) -> Command {
        command.args(ACCEPTED.iter().map(|(name, switch, _)| {
            let arg = Arg::new(*name).long(*name).hide(true).value_name("VALUE");
            if *switch {
                arg.num_args(0..=1).require_equals(true).default_missing_value("true")
            } else {
                arg.num_args(1).allow_hyphen_values(true)
            }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Accepted {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = ACCEPTED
            .iter()
            .filter(|(name, ..)| matches.value_source(name) == Some(ValueSource::CommandLine))
            .map(|(name, _, why)| (*name, *why));
        Ok(Self { given: given.collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
