{{/*
A ConfigMap with files, whose name no other content has: a pod keeps the configuration that it began with, also where the
API refuses the rest of an upgrade. The ConfigMap of the installed workload stays for one upgrade more, because pods that
are not yet replaced may start again.
dict "root" $ "component" "router" "suffix" "-router" "kind" "Deployment" "files" (dict NAME TEXT)
*/}}
{{- define "kvplane.configMap" -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $workload := printf "%s%s" (include "kvplane.fullname" .root) .suffix -}}
{{- $name := include "kvplane.configName" . -}}
{{- $maps := dict $name .files -}}
{{- range dig "spec" "template" "spec" "volumes" list (lookup "apps/v1" .kind $namespace $workload) -}}
{{- $before := dig "configMap" "name" "" . -}}
{{- if and (hasPrefix $workload $before) (ne $before $name) -}}
{{- with lookup "v1" "ConfigMap" $namespace $before }}{{ $_ := set $maps $before .data }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $name, $files := $maps }}
---
apiVersion: v1
kind: ConfigMap
metadata: {{- include "kvplane.metadata" (dict "root" $.root "component" $.component "name" $name) | nindent 2 }}
data: {{- toYaml $files | nindent 2 }}
{{- end }}
{{- end }}

{{/* Name of that ConfigMap. */}}
{{- define "kvplane.configName" -}}
{{ include "kvplane.fullname" .root }}{{ .suffix }}-{{ toJson .files | sha256sum | trunc 10 }}
{{- end }}

{{/* What no upgrade may change, compared with what is installed: the API would refuse it half way. */}}
{{- define "kvplane.validate.installed" -}}
{{- $full := include "kvplane.fullname" . }}
{{- range $component, $kind := dict "service" "StatefulSet" "router" "Deployment" "valkey" "Deployment" "worker" "DaemonSet" }}
{{- $name := eq $component "service" | ternary $full (printf "%s-%s" $full $component) }}
{{- $labels := dig "spec" "selector" "matchLabels" dict (lookup "apps/v1" $kind $.Release.Namespace $name) }}
{{- $selector := include "kvplane.selector" (dict "root" $ "component" $component) | fromYaml }}
{{- if and $labels (ne (toJson $labels) (toJson $selector)) }}
nameOverride: {{ $kind }} {{ $name }} is installed with the name {{ get $labels "app.kubernetes.io/name" | quote }}, which no upgrade may change: keep it, or set another fullnameOverride too
{{- end }}
{{- end }}
{{- $stateful := dict }}
{{- if include "kvplane.serves" . }}{{ $stateful = lookup "apps/v1" "StatefulSet" .Release.Namespace $full }}{{ end }}
{{- with $stateful.spec }}
{{- $sqlite := $.Values.store.sqlite }}
{{- $remedy := printf "no upgrade may change the volumes of StatefulSet %s: kubectl --namespace %s delete statefulset %s --cascade=orphan, then upgrade again; its pods run on until they are replaced" $full $.Release.Namespace $full }}
{{- $claims := .volumeClaimTemplates }}
{{- if ne (empty $claims) (ne $.Values.store.type "sqlite") }}
store.type: installed {{ empty $claims | ternary "without" "with" }} a volume, and {{ $.Values.store.type }} {{ empty $claims | ternary "needs one" "has none" }}; {{ $remedy }}
{{- else if $claims }}
{{- $spec := (first $claims).spec }}
{{- $size := $spec.resources.requests.storage }}
{{- if ne (include "kvplane.quantity" $size) (include "kvplane.quantity" $sqlite.size) }}
store.sqlite.size: installed with {{ $size }}, not {{ $sqlite.size }}; {{ $remedy }}; volumes that exist grow by their claims alone
{{- end }}
{{- if ne ($spec.storageClassName | default "") $sqlite.storageClassName }}
store.sqlite.storageClassName: installed with {{ $spec.storageClassName | default "" | quote }}, not {{ $sqlite.storageClassName | quote }}; {{ $remedy }}; volumes that exist keep theirs
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Secrets that values name, and their keys, that are not there, a line each; empty where the cluster cannot be read. */}}
{{- define "kvplane.missing" -}}
{{- if lookup "v1" "ServiceAccount" .Release.Namespace "default" }}
{{- $keys := dict "auth" (list "ownersKey" "tokensKey" "jwksKey") "access" (list "tokenKey" "certKey" "keyKey") "tls" (list "tls.crt" "tls.key") "tls.clientCA" (list "key") "metrics.token" (list "key") "peerServices" (list "key") }}
{{- $_ := merge $keys (dict "store.external" (list "usernameKey" "passwordKey" "caKey" "certKey" "keyKey") "store.sealing" (list "key") "store.builtin" (list "passwordKey")) }}
{{- range $path, $names := $keys }}
{{- $value := $.Values }}
{{- range splitList "." $path }}{{ $value = get $value . }}{{ end }}
{{- with $value.existingSecret }}
{{- $secret := lookup "v1" "Secret" $.Release.Namespace . }}
{{- if not $secret }}
{{ $path }}.existingSecret: there is no Secret {{ . }}
{{- end }}
{{- range ternary list $names (empty $secret) }}
{{- $key := ternary . (get $value .) (contains "." .) }}
{{- if and $key (not (hasKey ($secret.data | default dict) $key)) }}
{{ $path }}{{ ternary "" (printf ".%s" .) (contains "." .) }}: Secret {{ $value.existingSecret }} has no key {{ $key }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
