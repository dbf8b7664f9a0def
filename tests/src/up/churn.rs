//! Claims and pods that come, write, grow, read and go, whatever happens to the machine meanwhile.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
    core::Status,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::Machine;
use crate::content::Random;

/// How long one step may take, all restarts on its way included.
const PATIENCE: Duration = Duration::from_secs(120);
/// The pause between two observations.
const PAUSE: Duration = Duration::from_millis(40);

/// The API of a machine that comes and goes.
#[derive(Clone)]
pub struct Api {
    client: Arc<Mutex<Option<Client>>>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

impl Api {
    /// The API of a machine that runs.
    pub async fn of(machine: &Machine) -> Result<Self> {
        let api = Self { client: Arc::default() };
        api.find(machine).await?;
        Ok(api)
    }

    /// Finds it again after a restart.
    pub async fn find(&self, machine: &Machine) -> Result<()> {
        let kubeconfig = Kubeconfig::read_from(machine.data().join("apiserver/kubeconfig"))?;
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        config.read_timeout = Some(Duration::from_secs(5));
        let client = Client::try_from(config)?;
        *self.client.lock() = Some(client);
        Ok(())
    }

    /// Makes a request until it is answered; gives the object, or the refusal.
    async fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Result<Value, Box<Status>>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let client = self.client.lock().clone();
            let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
            let request = http::Request::builder().method(method).uri(path).header("Content-Type", kind);
            let request = request.body(serde_json::to_vec(body)?)?;
            match client.context("no API was ever found")?.request::<Value>(request).await {
                Ok(object) => return Ok(Ok(object)),
                Err(kube::Error::Api(refusal)) if refusal.code < 500 => return Ok(Err(refusal)),
                Err(error) => ensure!(Instant::now() < deadline, "{method} {path}: {error}"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Creates an object; one that is there already was created by an attempt that was cut off.
    pub async fn create(&self, kind: &str, object: &Value) -> Result<()> {
        match self.ask("POST", &path(kind), object).await? {
            Err(refusal) if refusal.code != 409 => bail!("create {kind}: {refusal:?}"),
            _ => Ok(()),
        }
    }

    /// An object, if it is there.
    pub async fn get(&self, kind: &str, name: &str) -> Result<Option<Value>> {
        match self.ask("GET", &format!("{}/{name}", path(kind)), &Value::Null).await? {
            Ok(object) => Ok(Some(object)),
            Err(refusal) if refusal.code == 404 => Ok(None),
            Err(refusal) => bail!("get {kind} {name}: {refusal:?}"),
        }
    }

    /// Changes an object by a merge patch.
    pub async fn patch(&self, kind: &str, name: &str, patch: &Value) -> Result<()> {
        match self.ask("PATCH", &format!("{}/{name}", path(kind)), patch).await? {
            Ok(_) => Ok(()),
            Err(refusal) => bail!("patch {kind} {name}: {refusal:?}"),
        }
    }

    /// Deletes an object and waits until it is gone.
    pub async fn delete(&self, kind: &str, name: &str) -> Result<()> {
        match self.ask("DELETE", &format!("{}/{name}", path(kind)), &json!({})).await? {
            Err(refusal) if refusal.code != 404 => bail!("delete {kind} {name}: {refusal:?}"),
            _ => self.until(kind, name, |object| object.is_none()).await,
        }
    }

    /// Waits until an object is so, or is gone.
    pub async fn until(&self, kind: &str, name: &str, so: impl Fn(Option<&Value>) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let object = self.get(kind, name).await?;
            if so(object.as_ref()) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{kind} {name} stays {object:#?}");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until a pod is in a phase that it cannot leave, or that was asked for.
    pub async fn until_phase(&self, pod: &str, wanted: &str) -> Result<()> {
        let phase = |object: Option<&Value>| {
            object.and_then(|object| object["status"]["phase"].as_str()).unwrap_or("gone").to_owned()
        };
        let done = ["gone", "Failed", "Succeeded"];
        self.until("pods", pod, |object| {
            let phase = phase(object);
            phase == wanted || (object.is_some() && done.contains(&phase.as_str()))
        })
        .await?;
        let object = self.get("pods", pod).await?;
        if phase(object.as_ref()) != wanted {
            let status = object.unwrap_or_default()["status"].take();
            bail!("{pod} is not {wanted}: {status:#}\nit printed: {}", self.log(pod).await?);
        }
        Ok(())
    }

    /// What a pod printed.
    async fn log(&self, pod: &str) -> Result<String> {
        let client = self.client.lock().clone();
        let request = http::Request::get(format!("{}/{pod}/log", path("pods"))).body(Vec::new())?;
        Ok(client.context("no API was ever found")?.request_text(request).await.unwrap_or_default())
    }
}

fn path(kind: &str) -> String {
    match kind {
        "persistentvolumes" => format!("/api/v1/{kind}"),
        _ => format!("/api/v1/namespaces/default/{kind}"),
    }
}

/// A claim of the default class.
pub fn claim(name: &str, mib: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": format!("{mib}Mi")}}},
    })
}

/// A pod that runs a script once, with the volume of a claim at /data.
pub fn pod(name: &str, claim: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": "busybox", "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
        },
    })
}

/// Lives of claims, one after the other, until it is told to stop; gives how many there were.
pub async fn live(api: Api, number: u64, mut random: Random, stop: watch::Receiver<bool>) -> Result<u64> {
    let mut lives = 0;
    while !*stop.borrow() {
        let name = format!("churn-{number}-{lives}");
        one_life(&api, &name, &mut random).await.with_context(|| format!("in the life of {name}"))?;
        lives += 1;
    }
    Ok(lives)
}

/// One claim: written, perhaps grown, read by another pod, perhaps used by one that is deleted as it runs, and gone.
async fn one_life(api: &Api, name: &str, random: &mut Random) -> Result<()> {
    let token = random.number().to_string();
    let (writer, reader, idler) = (format!("{name}-w"), format!("{name}-r"), format!("{name}-i"));
    api.create("persistentvolumeclaims", &claim(name, 16)).await?;
    let script = format!("echo {token} > /data/token && sync /data/token");
    api.create("pods", &pod(&writer, name, &script)).await?;
    if random.below(4) == 0 {
        // Nobody waits for this one: it may be deleted at any stage of its start.
        api.create("pods", &pod(&idler, name, "exec sleep 1000000")).await?;
        tokio::time::sleep(Duration::from_millis(random.below(300))).await;
        api.delete("pods", &idler).await?;
    }
    api.until_phase(&writer, "Succeeded").await?;
    api.delete("pods", &writer).await?;
    if random.below(3) == 0 {
        let larger = json!({"spec": {"resources": {"requests": {"storage": "24Mi"}}}});
        api.patch("persistentvolumeclaims", name, &larger).await?;
    }
    let script = format!("grep -qx {token} /data/token || {{ ls -la /data; df /data; exit 1; }}");
    api.create("pods", &pod(&reader, name, &script)).await?;
    api.until_phase(&reader, "Succeeded").await?;
    let object = api.get("persistentvolumeclaims", name).await?.context("the claim is gone")?;
    let volume = object["spec"]["volumeName"].as_str().context("the claim has no volume")?.to_owned();
    if random.below(2) == 0 {
        api.delete("pods", &reader).await?;
        api.delete("persistentvolumeclaims", name).await?;
    } else {
        // The claim first: it waits for its pod.
        let api_of_claim = api.clone();
        let claim_name = name.to_owned();
        let gone =
            tokio::spawn(async move { api_of_claim.delete("persistentvolumeclaims", &claim_name).await });
        api.delete("pods", &reader).await?;
        gone.await??;
    }
    api.until("persistentvolumes", &volume, |object| object.is_none()).await
}
