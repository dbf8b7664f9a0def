//! The objects of one namespace of a cluster, and those that have none: to create, to change, to wait for.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::kinds::{EVENT, Kind, POD, text};

/// How long anything may take before a test gives up; controllers of Kubernetes back off to half a minute.
const PATIENCE: Duration = Duration::from_secs(120);

/// A client of a cluster, and the namespace that is used.
pub(crate) struct Objects {
    client: Client,
    pub(crate) namespace: String,
}

impl Objects {
    pub(crate) fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace }
    }

    /// For what needs the client itself.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        let resource = kind.resource();
        if kind.namespaced {
            Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
        } else {
            Api::all_with(self.client.clone(), &resource)
        }
    }

    /// Creates an object, given without its type.
    pub(crate) async fn create(&self, kind: Kind, object: Value) -> Result<Value> {
        let typed = json!({"apiVersion": kind.api_version(), "kind": kind.name});
        let object: DynamicObject = serde_json::from_value(merged(typed, object))?;
        let made = self.api(kind).create(&PostParams::default(), &object).await;
        plain(made.with_context(|| format!("create a {}", kind.name))?)
    }

    /// An object, if it is there.
    pub(crate) async fn find(&self, kind: Kind, name: &str) -> Result<Option<Value>> {
        let found =
            self.api(kind).get_opt(name).await.with_context(|| format!("get {} {name}", kind.name))?;
        found.map(plain).transpose()
    }

    /// An object that is there.
    pub(crate) async fn get(&self, kind: Kind, name: &str) -> Result<Value> {
        self.find(kind, name).await?.with_context(|| format!("there is no {} {name}", kind.name))
    }

    /// All objects of a kind, in the test's namespace if it has namespaces.
    pub(crate) async fn list(&self, kind: Kind) -> Result<Vec<Value>> {
        let found = self.api(kind).list(&ListParams::default()).await?;
        found.items.into_iter().map(plain).collect()
    }

    /// Changes an object by a merge patch.
    pub(crate) async fn patch(&self, kind: Kind, name: &str, change: Value) -> Result<Value> {
        let patched = self.api(kind).patch(name, &PatchParams::default(), &Patch::Merge(change)).await;
        plain(patched.with_context(|| format!("change {} {name}", kind.name))?)
    }

    /// Changes an object's status by a merge patch.
    pub(crate) async fn patch_status(&self, kind: Kind, name: &str, status: Value) -> Result<()> {
        let change = Patch::Merge(json!({"status": status}));
        let patched = self.api(kind).patch_status(name, &PatchParams::default(), &change).await;
        patched.with_context(|| format!("change the status of {} {name}", kind.name)).map(drop)
    }

    /// Asks for an object's deletion; one that is gone needs none.
    pub(crate) async fn delete(&self, kind: Kind, name: &str) -> Result<()> {
        self.delete_by(kind, name, &DeleteParams::default()).await
    }

    /// Removes a pod as its kubelet does, when nothing of it runs any more.
    pub(crate) async fn remove_pod(&self, name: &str) -> Result<()> {
        self.delete_by(POD, name, &DeleteParams::default().grace_period(0)).await
    }

    /// Asks for an object's deletion in a certain way; one that is gone needs none.
    pub(crate) async fn delete_by(&self, kind: Kind, name: &str, how: &DeleteParams) -> Result<()> {
        match self.api(kind).delete(name, how).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error).with_context(|| format!("delete {} {name}", kind.name)),
        }
    }

    /// Waits until an object is so.
    pub(crate) async fn until(
        &self,
        kind: Kind,
        name: &str,
        what: &str,
        so: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.find(kind, name).await?;
            if let Some(object) = found.clone().filter(&so) {
                return Ok(object);
            }
            if Instant::now() > deadline {
                let seen = found.unwrap_or_default();
                let events = self.events(name).await?;
                bail!("{} {name} never {what}; it is {seen:#}\nwith events {events:#?}", kind.name);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until an object is gone.
    pub(crate) async fn gone(&self, kind: Kind, name: &str) -> Result<()> {
        self.until_all(&format!("{} {name} is gone", kind.name), kind, |all| {
            !all.iter().any(|object| text(object, "/metadata/name") == name)
        })
        .await
        .map(drop)
    }

    /// Waits until the objects of a kind are so.
    pub(crate) async fn until_all(
        &self,
        what: &str,
        kind: Kind,
        so: impl Fn(&[Value]) -> bool,
    ) -> Result<Vec<Value>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let all = self.list(kind).await?;
            if so(&all) {
                return Ok(all);
            }
            if Instant::now() > deadline {
                // The last ones are the newest.
                let last: Vec<String> = all.iter().rev().take(20).map(Value::to_string).collect();
                bail!("not within {PATIENCE:?}: {what}; there are {}:\n{}", all.len(), last.join("\n"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// What the events of an object say: reason and message.
    pub(crate) async fn events(&self, name: &str) -> Result<Vec<String>> {
        let events = self.list(EVENT).await?;
        let of_it = events.iter().filter(|event| text(event, "/involvedObject/name") == name);
        Ok(of_it.map(|event| format!("{}: {}", text(event, "/reason"), text(event, "/message"))).collect())
    }

    /// Waits until an object has an event with this reason, and gives its message.
    pub(crate) async fn event(&self, name: &str, reason: &str) -> Result<String> {
        let wanted =
            |event: &Value| text(event, "/involvedObject/name") == name && text(event, "/reason") == reason;
        let what = format!("{name} has an event {reason}");
        let events = self.until_all(&what, EVENT, |events| events.iter().any(wanted)).await?;
        Ok(events.iter().find(|event| wanted(event)).map_or("", |event| text(event, "/message")).to_owned())
    }
}

/// An object with the fields of both.
pub(crate) fn merged(mut object: Value, more: Value) -> Value {
    if let (Some(fields), Value::Object(more)) = (object.as_object_mut(), more) {
        fields.extend(more);
    }
    object
}

/// An object without what nobody wants to read in a complaint.
fn plain(mut object: DynamicObject) -> Result<Value> {
    object.metadata.managed_fields = None;
    Ok(serde_json::to_value(object)?)
}
