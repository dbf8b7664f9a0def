//! The environment of a container, from what its pod says and what that refers to.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Container, EnvFromSource, EnvVar, EnvVarSource, Pod};

use super::fields::{field_value, resource_value};
use super::objects::Objects;
use crate::plugin::Failed;

/// The environment of a container: what `envFrom` brings, then `env`, each variable once, in the order in which they
/// first appear. A later one replaces an earlier one of its name and can refer to it as `$(NAME)`.
pub(crate) fn environment(
    pod: &Pod,
    container: &Container,
    objects: &Objects,
) -> Result<Vec<(String, String)>, Failed> {
    let mut variables = Variables::default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    for source in container.env_from.iter().flatten() {
        variables.import(source, objects)?;
    }
    for variable in container.env.iter().flatten() {
        let value = match (variable.value.as_deref().unwrap_or_default(), &variable.value_from) {
            ("", Some(source)) => value_from(pod, container, objects, namespace, variable, source)?,
            (text, _) => Some(expand(text, |name| variables.get(name))),
        };
        if let Some(value) = value {
            variables.set(variable.name.clone(), value)?;
        }
    }
    Ok(variables.list)
}

/// Replaces each `$(NAME)` that is known; `$$` is a dollar sign, and what is not known stays as it is.
pub(crate) fn expand<'a>(text: &str, known: impl Fn(&str) -> Option<&'a str>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let reference = after.strip_prefix('(').and_then(|after| after.split_once(')'));
        rest = match (reference, after.strip_prefix('$')) {
            (_, Some(after)) => {
                expanded.push('$');
                after
            }
            (Some((name, after)), None) => {
                match known(name) {
                    Some(value) => expanded.push_str(value),
                    None => expanded.extend(["$(", name, ")"]),
                }
                after
            }
            (None, None) => {
                expanded.push('$');
                after
            }
        };
    }
    expanded.push_str(rest);
    expanded
}

/// Variables in the order in which they were first set.
#[derive(Default)]
struct Variables {
    list: Vec<(String, String)>,
    places: HashMap<String, usize>,
}

impl Variables {
    fn get(&self, name: &str) -> Option<&str> {
        self.places.get(name).map(|place| self.list[*place].1.as_str())
    }

    fn set(&mut self, name: String, value: String) -> Result<(), Failed> {
        // The value stays out of the message: it may be a secret.
        if value.contains('\0') || name.contains('\0') {
            let name = name.replace('\0', "\\0");
            return Err(Failed::unchanged(format!(
                "environment variable {name} holds a NUL byte, which none can"
            )));
        }
        if let Some(place) = self.places.get(&name) {
            self.list[*place].1 = value;
        } else {
            self.places.insert(name.clone(), self.list.len());
            self.list.push((name, value));
        }
        Ok(())
    }

    fn import(&mut self, source: &EnvFromSource, objects: &Objects) -> Result<(), Failed> {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        if let Some(wanted) = &source.config_map_ref {
            match objects.config_maps.get(&wanted.name) {
                Some(found) => {
                    for (key, value) in found.data.iter().flatten() {
                        self.set(format!("{prefix}{key}"), value.clone())?;
                    }
                }
                None if wanted.optional == Some(true) => {}
                None => return Err(missing("configmap", &wanted.name)),
            }
        }
        if let Some(wanted) = &source.secret_ref {
            match objects.secrets.get(&wanted.name) {
                Some(found) => {
                    for (key, value) in found.data.iter().flatten() {
                        self.set(format!("{prefix}{key}"), text(&value.0, &wanted.name, key)?)?;
                    }
                }
                None if wanted.optional == Some(true) => {}
                None => return Err(missing("secret", &wanted.name)),
            }
        }
        Ok(())
    }
}

/// The value of a variable that comes from elsewhere; none leaves it unset.
fn value_from(
    pod: &Pod,
    container: &Container,
    objects: &Objects,
    namespace: &str,
    variable: &EnvVar,
    source: &EnvVarSource,
) -> Result<Option<String>, Failed> {
    let refused = |error: super::fields::NoValue| {
        Failed::unchanged(format!("environment variable {}: {error}", variable.name))
    };
    if let Some(field) = &source.field_ref {
        return field_value(pod, &field.field_path, &objects.node).map(Some).map_err(refused);
    }
    if let Some(selector) = &source.resource_field_ref {
        return resource_value(pod, Some(container), selector, &objects.node).map(Some).map_err(refused);
    }
    if let Some(wanted) = &source.config_map_key_ref {
        let optional = wanted.optional == Some(true);
        return match objects.config_maps.get(&wanted.name) {
            None if optional => Ok(None),
            None => Err(missing("configmap", &wanted.name)),
            Some(found) => match found.data.as_ref().and_then(|data| data.get(&wanted.key)) {
                Some(value) => Ok(Some(value.clone())),
                None if optional => Ok(None),
                None => Err(missing_key("ConfigMap", namespace, &wanted.name, &wanted.key)),
            },
        };
    }
    if let Some(wanted) = &source.secret_key_ref {
        let optional = wanted.optional == Some(true);
        return match objects.secrets.get(&wanted.name) {
            None if optional => Ok(None),
            None => Err(missing("secret", &wanted.name)),
            Some(found) => match found.data.as_ref().and_then(|data| data.get(&wanted.key)) {
                Some(value) => text(&value.0, &wanted.name, &wanted.key).map(Some),
                None if optional => Ok(None),
                None => Err(missing_key("Secret", namespace, &wanted.name, &wanted.key)),
            },
        };
    }
    if source.file_key_ref.is_some() {
        let name = &variable.name;
        return Err(Failed::unchanged(format!(
            "environment variable {name} takes its value from a file (fileKeyRef), which Berth does not do yet"
        )));
    }
    Ok(Some(String::new()))
}

fn text(bytes: &[u8], secret: &str, key: &str) -> Result<String, Failed> {
    // The error of the conversion shows where it stopped, not what it read.
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| {
        Failed::unchanged(format!(
            "key {key} of secret {secret:?} is not text and cannot be an environment variable: mount it as a file"
        ))
    })
}

/// An object that is not there, in the words of the kubelet, and what to do.
pub(super) fn missing(kind: &str, name: &str) -> Failed {
    Failed::unchanged(format!("{kind} {name:?} not found"))
}

fn missing_key(kind: &str, namespace: &str, name: &str, key: &str) -> Failed {
    Failed::unchanged(format!("couldn't find key {key} in {kind} {namespace}/{name}"))
}

#[cfg(test)]
mod tests;
