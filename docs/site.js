// The button beside an example copies its commands alone: neither their prompts nor what they print.
document.addEventListener("click", event => {
  const button = event.target.closest("[data-clipboard-target]")
  const code = button && document.querySelector(button.dataset.clipboardTarget)
  if (!code || !code.querySelector(".gp")) return
  const commands = code.textContent.split("\n").filter(line => line.startsWith("$ "))
  button.dataset.clipboardText = commands.map(line => line.slice(2)).join("\n")
}, true)
