//! Services of `berth up`: names and addresses by which pods find each other, whatever becomes of the pods and of `berth up`.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use berth_e2e::up::Machine;

use super::{says, text, until_empty};

/// Three pods that answer with their names at the same port, each at its own address.
const PEERS: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: peers}
spec:
  clusterIP: None
  selector: {app: peers}
  ports: [{name: hello, port: 7000}]
---
apiVersion: v1
kind: Service
metadata: {name: front}
spec:
  selector: {app: peers}
  ports: [{name: web, port: 80, targetPort: hello}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: peers}
spec:
  serviceName: peers
  replicas: 3
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: peers}}
  template:
    metadata: {labels: {app: peers}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: busybox
        command:
        - perl
        - -MIO::Socket::INET
        - -e
        - |
          $s = IO::Socket::INET->new(LocalAddr => $ENV{POD_IP}, LocalPort => 7000, Listen => 5, ReuseAddr => 1) or die $@;
          while ($c = $s->accept) { print $c "$ENV{HOSTNAME}\n"; close $c }
        env: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
        ports: [{name: hello, containerPort: 7000}]
        readinessProbe: {tcpSocket: {port: hello}, periodSeconds: 1}
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}
"#;

/// A pod that only asks.
const CLIENT: &str = "
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 0
  hostAliases: [{ip: 192.0.2.7, hostnames: [seven.example]}]
  containers: [{name: main, image: busybox, command: [sleep, \"1000000\"]}]
";

fn rolled_out(machine: &Machine) -> Result<()> {
    machine.kubectl(&["rollout", "status", "statefulset/peers", "--timeout=120s"]).map(|_| ())
}

fn address(machine: &Machine, pod: &str) -> Result<String> {
    Ok(text(&machine.get(&format!("pod/{pod}"))?, "/status/podIP").to_owned())
}

/// The addresses that a name has for a pod; none if it has none.
fn resolved(machine: &Machine, pod: &str, name: &str) -> Result<BTreeSet<String>> {
    let script = format!("getent ahostsv4 {name} || true");
    let found = machine.kubectl(&["exec", pod, "--", "sh", "-c", &script])?;
    Ok(found.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// Who answers a pod at `host:port`; nobody is an empty text.
fn answer(machine: &Machine, pod: &str, at: &str) -> Result<String> {
    let script =
        format!("perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(\"{at}\") or exit 0; print <$s>'");
    Ok(machine.kubectl(&["exec", pod, "--", "sh", "-c", &script])?.trim().to_owned())
}

/// Waits until these pods, and no others, are behind both Services.
fn answered_by(machine: &Machine, from: &str, pods: &[&str]) -> Result<()> {
    let wanted: BTreeSet<String> = pods.iter().map(|pod| address(machine, pod)).collect::<Result<_>>()?;
    ensure!(wanted.len() == pods.len(), "each pod has an address of its own: {wanted:?}");
    machine.until("the headless Service has the addresses of its pods", || {
        Ok((resolved(machine, from, "peers")? == wanted).then_some(()))
    })?;
    for pod in pods {
        let full = format!("{pod}.peers.default.svc.cluster.local");
        for name in [&full, &format!("{pod}.peers")] {
            let found = resolved(machine, from, name)?;
            ensure!(found == BTreeSet::from([address(machine, pod)?]), "{name} is {found:?}");
        }
        let backwards = machine.kubectl(&["exec", from, "--", "getent", "hosts", &address(machine, pod)?])?;
        says(&backwards, &full)?;
        ensure!(answer(machine, from, &format!("{pod}.peers:7000"))? == *pod, "{pod} answers {from}");
    }
    machine.until("each pod gets its turn", || {
        let all: Result<BTreeSet<String>> = pods.iter().map(|_| answer(machine, from, "front:80")).collect();
        Ok((all? == pods.iter().map(|pod| (*pod).to_owned()).collect()).then_some(()))
    })
}

#[test]
fn peers_of_a_stateful_set_find_each_other() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.apply(PEERS)?;
    rolled_out(&machine)?;
    let all = ["peers-0", "peers-1", "peers-2"];
    for pod in all {
        answered_by(&machine, pod, &all)?;
    }
    machine.apply(CLIENT)?;
    machine.ready("client")?;
    answered_by(&machine, "client", &all)?;
    let front = text(&machine.get("service/front")?, "/spec/clusterIP").to_owned();
    let environment = machine.kubectl(&["exec", "client", "--", "env"])?;
    says(&environment, &format!("FRONT_PORT_80_TCP=tcp://{front}:80"))?;
    says(&environment, "KUBERNETES_SERVICE_HOST=127.0.0.1")?;
    ensure!(resolved(&machine, "client", "front.default")? == BTreeSet::from([front.clone()]));
    ensure!(resolved(&machine, "client", "seven.example")? == BTreeSet::from(["192.0.2.7".to_owned()]));
    ensure!(resolved(&machine, "client", "other.default.svc.cluster.local")?.is_empty());

    // What goes with a pod are its name and its turn, and no more.
    machine.kubectl(&["scale", "statefulset/peers", "--replicas=2"])?;
    machine.kubectl(&["wait", "pod/peers-2", "--for=delete", "--timeout=60s"])?;
    answered_by(&machine, "client", &all[..2])?;
    ensure!(resolved(&machine, "client", "peers-2.peers")?.is_empty());

    // A crash takes the names and the forwarding away, and the next start brings them back as they were.
    let before = address(&machine, "peers-0")?;
    machine.kill()?;
    machine.restart()?;
    ensure!(address(&machine, "peers-0")? == before, "the pod has another address");
    ensure!(
        text(&machine.get("service/front")?, "/spec/clusterIP") == front,
        "the Service has another address"
    );
    machine.kubectl(&["scale", "statefulset/peers", "--replicas=3"])?;
    rolled_out(&machine)?;
    answered_by(&machine, "client", &all)?;

    // Deleted and made again.
    machine.delete("statefulset/peers")?;
    machine.until("nobody answers", || {
        let nobody = answer(&machine, "client", "front:80")?.is_empty()
            && resolved(&machine, "client", "peers")?.is_empty();
        Ok(nobody.then_some(()))
    })?;
    machine.apply(PEERS)?;
    rolled_out(&machine)?;
    answered_by(&machine, "client", &all)?;
    for gone in ["statefulset/peers", "service/peers", "service/front", "pod/client"] {
        machine.delete(gone)?;
    }
    machine.until("endpoints go with their Service", || {
        let left = machine.kubectl(&["get", "endpoints,endpointslices", "-o", "name"])?;
        Ok((!left.contains("peers") && !left.contains("front")).then_some(()))
    })?;
    machine.kubectl(&["delete", "pvc", "--all"])?;
    until_empty(&machine)?;
    machine.finish()
}

/// A Service of every type, and one whose endpoints a person writes.
const OTHERS: &str = "
apiVersion: v1
kind: Service
metadata: {name: node-port}
spec: {type: NodePort, ports: [{port: 80}], selector: {app: none}}
---
apiVersion: v1
kind: Service
metadata: {name: balanced}
spec: {type: LoadBalancer, ports: [{port: 80}], selector: {app: none}}
---
apiVersion: v1
kind: Service
metadata: {name: alias}
spec: {type: ExternalName, externalName: written.default.svc.cluster.local}
---
apiVersion: v1
kind: Service
metadata: {name: written}
spec: {ports: [{port: 443, targetPort: 6443}]}
---
apiVersion: v1
kind: Endpoints
metadata: {name: written}
subsets: [{addresses: [{ip: 127.0.0.1}], ports: [{port: 6443}]}]
";

#[test]
fn services_get_addresses_and_say_what_is_not_served() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.apply(OTHERS)?;
    let event = |name: &str, part: &str| {
        machine.until(&format!("an event on {name} says {part}"), || {
            let said = machine.kubectl(&["events", "--for", &format!("service/{name}")])?;
            Ok((said.contains("NotServed") && said.contains(part)).then_some(()))
        })
    };
    event("node-port", "type NodePort: no port of the node is opened")?;
    event("balanced", "type LoadBalancer: there is no load balancer")?;
    let mirrored = machine.until("endpoints that a person wrote are in a slice", || {
        let slices =
            machine.kubectl(&["get", "endpointslices", "-l", "kubernetes.io/service-name=written"])?;
        Ok(slices.contains("127.0.0.1").then_some(slices))
    })?;
    says(&mirrored, "6443")?;
    let address = |name: &str| -> Result<String> {
        Ok(text(&machine.get(&format!("service/{name}"))?, "/spec/clusterIP").to_owned())
    };
    let all: BTreeSet<String> = ["node-port", "balanced", "written", "kubernetes"]
        .iter()
        .map(|name| address(name))
        .collect::<Result<_>>()?;
    ensure!(all.len() == 4 && all.iter().all(|address| address.starts_with("127.")), "{all:?}");
    ensure!(address("alias")?.is_empty());
    let taken = machine.kubectl(&[
        "create",
        "service",
        "clusterip",
        "other",
        "--tcp=80",
        "--clusterip",
        &address("written")?,
    ]);
    says(&format!("{:#}", taken.unwrap_err()), "provided IP is already allocated")?;
    let outside =
        machine.kubectl(&["create", "service", "clusterip", "other", "--tcp=80", "--clusterip", "10.1.2.3"]);
    says(&format!("{:#}", outside.unwrap_err()), "is not in the valid range")?;
    let patch = r#"{"spec": {"clusterIP": "127.1.2.3", "clusterIPs": ["127.1.2.3"]}}"#;
    let changed = machine.kubectl(&["patch", "service/written", "--type=merge", "-p", patch]);
    says(&format!("{:#}", changed.unwrap_err()), "may not change once set")?;
    // An address is free again with its Service.
    let freed = address("balanced")?;
    machine.delete("service/balanced")?;
    machine.kubectl(&["create", "service", "clusterip", "other", "--tcp=80", "--clusterip", &freed])?;

    machine.apply(CLIENT)?;
    machine.ready("client")?;
    let written = BTreeSet::from([address("written")?]);
    ensure!(resolved(&machine, "client", "written.default")? == written);
    ensure!(resolved(&machine, "client", "alias.default")? == written, "an alias of a name of here");
    // Pods do not lose the API server with its Service.
    let own = address("kubernetes")?;
    machine.kubectl(&["delete", "service", "kubernetes"])?;
    machine.until("the Service of the API server is there again, with its endpoints", || {
        let Ok(service) = machine.get("service/kubernetes") else { return Ok(None) };
        let slices =
            machine.kubectl(&["get", "endpointslices", "-l", "kubernetes.io/service-name=kubernetes"])?;
        let is_back = text(&service, "/spec/clusterIP") == own && slices.contains("127.0.0.1");
        Ok(is_back.then_some(()))
    })?;
    machine.kill()?;
    machine.restart()?;
    ensure!(text(&machine.get("service/other")?, "/spec/clusterIP") == freed);
    machine.delete("pod/client")?;
    machine.finish()
}
