//! The command line: consistency, Go's style, and every flag of the upstream components.

use super::*;

#[test]
fn the_command_line_is_consistent() {
    TABLES.command(&[]).debug_assert();
}

/// What a command line with `--help` prints.
fn help(words: &[&str]) -> String {
    let words = ["berth"].iter().chain(words).chain(&["--help"]).map(OsString::from);
    TABLES.parse(words).unwrap_err().to_string()
}

#[test]
fn the_commands_fit_one_screen_in_groups() {
    let text = help(&[]);
    let lines: Vec<_> = text.trim_end().lines().collect();
    assert!(lines.len() <= 48, "{} lines:\n{text}", lines.len());
    for line in &lines {
        assert!(line.chars().count() <= 100, "{line:?} is too long");
    }
    for command in TABLES.command(&[]).get_subcommands() {
        let (name, is_sidecar) = (command.get_name(), TABLES.by_name().contains(&command.get_name()));
        let shown = |line: &&&str| {
            let mut words = line.split([' ', ',']).filter(|word| !word.is_empty());
            if is_sidecar { words.any(|word| word == name) } else { words.next() == Some(name) }
        };
        assert_eq!(lines.iter().filter(shown).count(), 1, "{}:\n{text}", command.get_name());
    }
    let at = |what: &str| lines.iter().position(|line| line.trim_start().starts_with(what)).unwrap();
    let order =
        ["Machine", "up ", "Driver", "driver ", "Inspection", "explain ", "Sidecars,", "csi-provisioner"];
    assert!(order.map(at).is_sorted(), "{text}");
}

#[test]
fn the_flags_of_a_backend_are_shown_only_with_that_backend() {
    for (words, shown) in [
        (&["up"][..], false),
        (&["up", "--driver", "local"], false),
        (&["up", "--driver", "local", "--driver", "nfs"], true),
        (&["up", "--driver=nfs"], true),
        (&["driver", "local"], false),
        (&["driver", "nfs"], true),
    ] {
        assert_eq!(help(words).contains("--mount-mode"), shown, "{words:?}");
    }
    // They are taken all the same.
    assert!(parsed(&["berth", "up", "--mount-mode=fuse", "--driver=nfs"].map(str::to_owned)).is_ok());
}

#[test]
fn flags_are_taken_with_one_dash_as_go_programs_do() {
    let given = ["berth", "driver", "local", "-nodeid=n", "-v=5", "--endpoint", "-x", "-unknown"];
    let taken = with_two_dashes(given.map(OsString::from).into(), &TABLES.command(&[]));
    assert_eq!(taken, ["berth", "driver", "local", "--nodeid=n", "-v=5", "--endpoint", "-x", "-unknown"]);
}

#[test]
fn a_component_runs_by_the_name_of_the_program() {
    let words = |given: &[&str]| -> Vec<OsString> {
        with_own_name(given.iter().map(OsString::from).collect(), &TABLES.by_name())
    };
    for name in TABLES.by_name() {
        assert_eq!(words(&[&format!("/usr/bin/{name}"), "-v=5"]), ["berth", name, "-v=5"]);
        assert!(TABLES.command(&[]).find_subcommand(name).is_some(), "there is no {name}");
    }
    assert_eq!(words(&["/usr/bin/berth", "up"]), ["/usr/bin/berth", "up"]);
    assert_eq!(words(&["./other", "up"]), ["./other", "up"]);
}

/// How a flag's value is written.
#[derive(Clone, Copy)]
enum Takes {
    Switch,
    Value(&'static str),
}
use Takes::{Switch, Value};

/// What provisioner, attacher, resizer, snapshotter and, but for a few, the snapshot controller share.
const COMMON: &[(&str, Takes)] = &[
    ("leader-election", Switch),
    ("leader-election-namespace", Value("kube-system")),
    ("leader-election-lease-duration", Value("30s")),
    ("leader-election-renew-deadline", Value("20s")),
    ("leader-election-retry-period", Value("4s")),
    ("leader-election-labels", Value("app:csi,tier:storage")),
    ("kube-api-qps", Value("100")),
    ("kube-api-burst", Value("200")),
    ("http-endpoint", Value(":8080")),
    ("metrics-path", Value("/metrics")),
    ("metrics-address", Value(":8081")),
    ("kubeconfig", Value("/etc/kube/config")),
    ("feature-gates", Value("ReleaseLeaderElectionOnExit=true")),
    ("retry-interval-start", Value("500ms")),
    ("retry-interval-max", Value("10m")),
];

const CONNECTION: &[(&str, Takes)] = &[("csi-address", Value("/csi/csi.sock"))];

const LOGGING: &[(&str, Takes)] = &[
    ("automaxprocs", Switch),
    ("v", Value("5")),
    ("vmodule", Value("controller=5")),
    ("logging-format", Value("json")),
    ("log-flush-frequency", Value("5s")),
    ("log-text-split-stream", Switch),
    ("log-text-info-buffer-size", Value("0")),
    ("log-json-split-stream", Switch),
    ("log-json-info-buffer-size", Value("1Mi")),
];

const PROVISIONER: &[(&str, Takes)] = &[
    ("timeout", Value("150s")),
    ("worker-threads", Value("100")),
    ("extra-create-metadata", Switch),
    ("default-fstype", Value("ext4")),
    ("strict-topology", Switch),
    ("immediate-topology", Switch),
    ("volume-name-prefix", Value("pvc")),
    ("volume-name-uuid-length", Value("-1")),
    ("enable-capacity", Switch),
    ("capacity-poll-interval", Value("1m")),
    ("capacity-for-immediate-binding", Switch),
    ("capacity-ownerref-level", Value("-1")),
    ("capacity-threads", Value("1")),
    ("kube-api-capacity-qps", Value("1")),
    ("kube-api-capacity-burst", Value("5")),
    ("node-deployment", Switch),
    ("node-deployment-immediate-binding", Switch),
    ("node-deployment-base-delay", Value("20s")),
    ("node-deployment-max-delay", Value("60s")),
    ("controller-publish-readonly", Switch),
    ("prevent-volume-mode-conversion", Switch),
    ("cloning-protection-threads", Value("1")),
    ("snapshot-orphan-sweep-interval", Value("5m")),
    ("enable-pprof", Switch),
    ("master", Value("https://127.0.0.1:6443")),
];

const ATTACHER: &[(&str, Takes)] = &[
    ("timeout", Value("60s")),
    ("worker-threads", Value("10")),
    ("reconcile-sync", Value("1m")),
    ("max-entries", Value("0")),
    ("default-fstype", Value("ext4")),
    ("resync", Value("10m")),
    ("max-grpc-log-length", Value("-1")),
];

const RESIZER: &[(&str, Takes)] = &[
    ("workers", Value("10")),
    ("timeout", Value("10s")),
    ("handle-volume-inuse-error", Switch),
    ("extra-modify-metadata", Switch),
    ("resync-period", Value("10m")),
    ("master", Value("https://127.0.0.1:6443")),
];

const SNAPSHOTTER: &[(&str, Takes)] = &[
    ("timeout", Value("1m")),
    ("worker-threads", Value("10")),
    ("resync-period", Value("15m")),
    ("snapshot-name-prefix", Value("snapshot")),
    ("snapshot-name-uuid-length", Value("-1")),
    ("groupsnapshot-name-prefix", Value("groupsnapshot")),
    ("groupsnapshot-name-uuid-length", Value("12")),
    ("extra-create-metadata", Switch),
    ("node-deployment", Switch),
];

const SNAPSHOT_CONTROLLER: &[(&str, Takes)] = &[
    ("worker-threads", Value("10")),
    ("resync-period", Value("15m")),
    ("enable-distributed-snapshotting", Switch),
    ("prevent-volume-mode-conversion", Switch),
    ("retry-crd-interval-max", Value("30s")),
];

const REGISTRAR: &[(&str, Takes)] = &[
    ("kubelet-registration-path", Value("/var/lib/kubelet/plugins/x/csi.sock")),
    ("plugin-registration-path", Value("/registration")),
    ("timeout", Value("1s")),
    ("http-endpoint", Value(":9809")),
    ("health-port", Value("9809")),
    ("enable-pprof", Switch),
    ("connection-timeout", Value("10s")),
    ("mode", Value("registration")),
];

const LIVENESS_PROBE: &[(&str, Takes)] = &[
    ("probe-timeout", Value("3s")),
    ("http-endpoint", Value(":9808")),
    ("health-port", Value("9808")),
    ("metrics-path", Value("/metrics")),
    ("metrics-address", Value(":8081")),
];

const NFS: &[(&str, Takes)] = &[
    ("endpoint", Value("unix:///tmp/csi.sock")),
    ("nodeid", Value("node-1")),
    ("drivername", Value("nfs.csi.k8s.io")),
    ("mount-permissions", Value("0777")),
    ("working-mount-dir", Value("/tmp")),
    ("default-ondelete-policy", Value("retain")),
    ("vol-stats-cache-expire-in-minutes", Value("5")),
    ("remove-archived-volume-path", Switch),
    ("use-tar-command-in-snapshot", Switch),
    ("enable-snapshot-compression", Switch),
    ("v", Value("5")),
];

const HEALTH_MONITOR: &[(&str, Takes)] = &[
    ("timeout", Value("15s")),
    ("worker-threads", Value("10")),
    ("monitor-interval", Value("1m")),
    ("list-volumes-interval", Value("5m")),
    ("volume-list-add-interval", Value("5m")),
    ("node-list-add-interval", Value("5m")),
    ("enable-node-watcher", Switch),
    ("resync", Value("10m")),
];

fn parsed(words: &[String]) -> Result<ArgMatches, clap::Error> {
    TABLES.parse(words.iter().map(OsString::from))
}

/// Every way in which Go programs take a flag.
fn ways(flag: &str, takes: Takes) -> Vec<Vec<String>> {
    match takes {
        Switch => ["--F", "-F", "--F=true", "--F=false", "-F=T", "--F=0"]
            .map(|way| vec![way.replace('F', flag)])
            .into(),
        Value(value) => vec![
            vec![format!("--{flag}={value}")],
            vec![format!("-{flag}={value}")],
            vec![format!("--{flag}"), value.to_owned()],
            vec![format!("-{flag}"), value.to_owned()],
        ],
    }
}

#[test]
fn every_flag_of_every_upstream_component_is_taken_in_every_way_that_go_takes_it() {
    for (program, tables) in [
        ("csi-provisioner", [CONNECTION, COMMON, LOGGING, PROVISIONER]),
        ("csi-attacher", [CONNECTION, COMMON, LOGGING, ATTACHER]),
        ("csi-resizer", [CONNECTION, COMMON, LOGGING, RESIZER]),
        ("csi-snapshotter", [CONNECTION, COMMON, LOGGING, SNAPSHOTTER]),
        ("snapshot-controller", [&[], COMMON, LOGGING, SNAPSHOT_CONTROLLER]),
        ("csi-node-driver-registrar", [CONNECTION, &[], LOGGING, REGISTRAR]),
        ("livenessprobe", [CONNECTION, &[], LOGGING, LIVENESS_PROBE]),
        ("csi-external-health-monitor-controller", [CONNECTION, COMMON, LOGGING, HEALTH_MONITOR]),
    ] {
        for way in 0..6 {
            let flags = tables.into_iter().flatten();
            let words = flags.flat_map(|(flag, takes)| {
                let ways = ways(flag, *takes);
                // Twice, as a chart and its user do; the last one counts.
                [ways[0].clone(), ways[way % ways.len()].clone()].concat()
            });
            let line: Vec<String> = [program.to_owned()].into_iter().chain(words).collect();
            if let Err(mistake) = parsed(&line) {
                panic!("{line:?}: {mistake}");
            }
        }
    }
}

#[test]
fn every_flag_of_the_nfs_driver_is_taken() {
    for role in ["driver", "controller", "node"] {
        for way in 0..6 {
            let flags = NFS.iter().flat_map(|(flag, takes)| {
                let ways = ways(flag, *takes);
                ways[way % ways.len()].clone()
            });
            let line: Vec<String> =
                ["berth", role, "nfs"].map(str::to_owned).into_iter().chain(flags).collect();
            if let Err(mistake) = parsed(&line) {
                panic!("{line:?}: {mistake}");
            }
        }
    }
}

#[test]
fn a_flag_that_no_component_has_is_refused() {
    for program in TABLES.by_name() {
        let words = [program.to_owned(), "--no-such-flag=1".to_owned()];
        assert!(parsed(&words).is_err(), "{program}");
    }
}

/// Rows that this program does not have: whatever starts roles takes them from the tables alone.
mod more_rows {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use berth_csi::Endpoint;
    use berth_kube::Cluster;
    use berth_testkit::EmbeddedServer;
    use clap::{Arg, value_parser};
    use prometheus_client::registry::Registry;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::driver::Served;
    use crate::sidecars::Scope;

    static STARTS: AtomicUsize = AtomicUsize::new(0);
    static SUM: AtomicUsize = AtomicUsize::new(0);

    const COUNTER: Sidecar = Sidecar {
        name: "csi-counter",
        short_name: "counter",
        replaces: "nothing",
        about: "Count",
        scope: Scope::Driver,
        lease: "external-counter-",
        flags: |command| {
            command.arg(Arg::new("step").long("step").default_value("2").value_parser(value_parser!(usize)))
        },
        missing: |_| None,
        configure: |matches, _, _| {
            let step = matches.get_one::<usize>("step").copied().unwrap_or_default();
            Ok(Arc::new(move |cluster: Cluster, driver| {
                Box::pin(async move {
                    SUM.fetch_add(step, Ordering::SeqCst);
                    assert!(STARTS.fetch_add(1, Ordering::SeqCst) > 0, "the first start fails");
                    assert_eq!(driver.expect("it is beside one").ready().await.name, "local.berth.dev");
                    cluster.shutdown().cancelled().await;
                })
            }))
        },
    };

    fn tables<T>(backends: &[Backend], sidecars: &[Sidecar], test: impl FnOnce(Tables<'_>) -> T) -> T {
        test(Tables { backends, sidecars })
    }

    #[test]
    fn a_row_is_all_that_the_command_lines_need() {
        let backend = Backend { name: "shelf", about: "Volumes on a shelf", ..BACKENDS[0] };
        tables(&[backend], &[COUNTER], |tables| {
            tables.command(&[]).debug_assert();
            for words in [
                "csi-counter --step=3 --leader-election --csi-address=/x",
                "/usr/bin/csi-counter -step=3",
                "berth sidecars --controllers=counter --step=3",
                "berth sidecars --controllers=csi-counter",
                "berth driver shelf --data-dir=/x",
                "berth controller shelf --step=3 --controllers=counter",
                "berth node shelf --plugin-registration-path=/x",
                "berth up --driver shelf",
            ] {
                let parsed = tables.parse(words.split(' ').map(OsString::from));
                assert!(parsed.is_ok(), "{words}: {:?}", parsed.err());
            }
            let mistaken = tables.parse(["berth", "up", "--driver", "local"].map(OsString::from).into_iter());
            assert!(mistaken.is_err());
        });
    }

    #[tokio::test]
    async fn rows_run_in_berth_up_and_a_sidecar_that_panics_is_started_again() {
        let api_server = EmbeddedServer::start().await;
        let (loops, serving) = (CancellationToken::new(), CancellationToken::new());
        let cluster = Cluster::new(api_server.client(), loops.clone());

        let shelf = Backend { name: "shelf", about: "Volumes on a shelf", ..BACKENDS[0] };
        let line = shelf
            .embed(&up::default_flags().unwrap(), &api_server.directory().join(shelf.name), "n", Vec::new())
            .unwrap();
        let opened = (shelf.open)(line, berth_backends::services::Mode::All).await.unwrap();
        let endpoint = Endpoint::Unix(api_server.directory().join("csi.sock"));
        let mut registry = Registry::default();
        let servers = crate::launch::Servers::new();
        let served =
            Served::start(opened, &endpoint, None, &mut registry, &servers, serving.clone()).await.unwrap();

        let table: Vec<_> = SIDECARS.iter().copied().chain([COUNTER]).collect();
        let started = stack::start_driver_sidecars(
            &table,
            &cluster,
            &served,
            None,
            &crate::metrics::Telemetry::default(),
        )
        .unwrap();
        while STARTS.load(Ordering::SeqCst) < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(SUM.load(Ordering::SeqCst), 4, "it has the flag's default at each start");
        loops.cancel();
        for task in started {
            task.await.unwrap();
        }
        serving.cancel();
        served.ended().await.unwrap();
    }
}
