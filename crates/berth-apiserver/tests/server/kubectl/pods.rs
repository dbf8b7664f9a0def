//! `kubectl logs` and `kubectl exec`.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use serde_json::json;

use super::{Cluster, kubectls};

/// A pod on the node, with two containers.
async fn with_pod(kubectl: &std::path::Path) -> Cluster {
    let cluster = Cluster::start(kubectl).await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "p", "annotations": { "kubectl.kubernetes.io/default-container": "main" } },
        "spec": {
            "nodeName": "played",
            "containers": [{ "name": "main", "image": "x" }, { "name": "side", "image": "x" }],
        },
    });
    let free = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "free" },
        "spec": { "containers": [{ "name": "main", "image": "x" }] },
    });
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": [pod, free] });
    std::fs::write(cluster.directory.path().join("pods.json"), list.to_string()).unwrap();
    cluster.print("kubectl create -f pods.json").await;
    cluster
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_are_read_in_part_and_in_whole() {
    for kubectl in kubectls() {
        let cluster = with_pod(&kubectl).await;
        let whole = cluster.print("kubectl logs p").await;
        assert!(whole.contains("container: \"main\", follow: false"), "{whole}");
        let part =
            "kubectl logs p -c side --tail=2 --limit-bytes=9 --timestamps --since-time=2026-01-01T00:00:00Z";
        let part = cluster.print(part).await;
        for given in ["\"side\"", "2026-01-01T00:00:00Z", "Some(2)", "Some(9)", "timestamps: true"] {
            assert!(part.contains(given), "{given}: {part}");
        }
        assert_eq!(cluster.print("kubectl logs free").await, "");
        let refused = cluster.run("kubectl logs p --previous").await;
        assert_eq!(refused.code, Some(1));
        assert!(refused.stderr.contains("previous terminated container \"main\" in pod \"p\" not found"));
        let refused = cluster.run("kubectl logs p -c none").await;
        assert!(refused.stderr.contains("container none is not valid for pod p"), "{refused:?}");
        let refused =
            cluster.run("kubectl get --raw '/api/v1/namespaces/default/pods/p/log?tailLines=-1'").await;
        assert!(refused.stderr.contains("tailLines: Invalid value: -1"), "{refused:?}");
    }
}

/// A process that is ended with the test.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_followed_log_is_shown_as_it_grows() {
    for kubectl in kubectls() {
        let cluster = with_pod(&kubectl).await;
        let child = cluster.shell("exec kubectl logs -f p").stdout(Stdio::piped()).spawn().unwrap();
        let mut child = Started(child);
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        let reading = tokio::task::spawn_blocking(move || (lines.next().unwrap().unwrap(), lines));
        let (first, mut lines) = reading.await.unwrap();
        assert!(first.contains("follow: true"), "{first}");
        cluster.node.more.notify_one();
        let rest: Vec<String> =
            tokio::task::spawn_blocking(move || lines.by_ref().map(Result::unwrap).collect()).await.unwrap();
        assert_eq!(rest, ["more"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_gets_its_input_and_tells_its_exit_code() {
    for kubectl in kubectls() {
        let cluster = with_pod(&kubectl).await;
        let copied = "seq 200000 > in && kubectl exec -i p -- cat < in > out && cmp in out && echo same";
        assert_eq!(cluster.print(copied).await, "same\n");
        let failed = cluster.run("kubectl exec p -c side -- fail").await;
        assert_eq!((failed.code, failed.stdout.as_str()), (Some(7), "so far\n"), "{failed:?}");
        assert!(failed.stderr.starts_with("no further\ncommand terminated with exit code 7"), "{failed:?}");
        let missing = cluster.run("kubectl exec p -- nothing").await;
        assert_eq!(missing.code, Some(1));
        assert!(missing.stderr.contains("there is no program \"nothing\""), "{missing:?}");
        let free = cluster.run("kubectl exec free -- cat").await;
        assert!(free.stderr.contains("pod free does not have a host assigned"), "{free:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_on_a_terminal_knows_its_size() {
    for kubectl in kubectls() {
        let cluster = with_pod(&kubectl).await;
        let terminal = "script -qec 'stty cols 91 rows 33; kubectl exec -it p -- size' /dev/null";
        let shown = cluster.print(terminal).await;
        assert!(shown.contains("91 x 33"), "{shown}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_ends_with_its_kubectl() {
    for kubectl in kubectls() {
        let cluster = with_pod(&kubectl).await;
        let mut child = Started(cluster.shell("exec kubectl exec p -- wait").spawn().unwrap());
        cluster.node.waits.notified().await;
        // `timeout` hands the signal on.
        cluster.print(&format!("kill {}", child.0.id())).await;
        cluster.node.dropped.cancelled().await;
        tokio::task::spawn_blocking(move || child.0.wait().unwrap()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_done_is_said_clearly() {
    for kubectl in kubectls() {
        let cluster = with_pod(&kubectl).await;
        let old = cluster.run("KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false kubectl exec p -- cat").await;
        assert_eq!(old.code, Some(1));
        assert!(old.stderr.contains("use kubectl 1.31 or later"), "{old:?}");
        let attach = cluster.run("KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false kubectl attach p").await;
        assert!(attach.stderr.contains("use kubectl 1.31 or later"), "{attach:?}");
    }
}
